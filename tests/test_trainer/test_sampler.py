"""Order of the samples: coverage, budget, proportion, resume."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer.config import SamplerConfig
from trainer.interleave import interleave
from trainer.order import order_report, window_kl
from trainer.sampler import EpochPlan, bucket_edges, epoch_batches, iterate

SHARES = (0.05, 0.08, 0.10, 0.11, 0.14, 0.52)
"""Shares of the six length buckets in a real run, the largest being the one that can run."""

quick = settings(max_examples=60, deadline=None)


@st.composite
def lengths(draw: st.DrawFn) -> np.ndarray:
    """Up to 600 lengths of at most 64, often few distinct ones so that batches fill exactly."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return rng.integers(1, draw(st.integers(2, 65)), draw(st.integers(1, 600)))


configs = st.builds(
    SamplerConfig,
    tokens_per_batch=st.integers(64, 200),
    num_buckets=st.integers(1, 7),
    bucket_edges=st.sampled_from([(), (0, 10, 30, 64), (8, 16, 20), (100, 200)]),
)


def batches(plan: EpochPlan) -> list[np.ndarray]:
    return [plan.batch(i) for i in range(len(plan))]


def composition(plan: EpochPlan) -> set[frozenset[int]]:
    return {frozenset(batch.tolist()) for batch in batches(plan)}


def equal(a: EpochPlan, b: EpochPlan) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("sample", "offset", "bucket", "edge")
    )


def window_deviation(label: np.ndarray, window: int) -> float:
    """Largest distance of a bucket's count in any window from the window's share."""
    worst = 0.0
    for value in np.unique(label):
        seen = np.concatenate([[0], np.cumsum(label == value)])
        count = seen[window:] - seen[:-window]
        worst = max(worst, float(np.abs(count - window * seen[-1] / len(label)).max()))
    return worst


def longest_run(label: np.ndarray) -> int:
    edge = np.flatnonzero(np.concatenate([[True], np.diff(label) != 0, [True]]))
    return int(np.diff(edge).max())


@quick
@given(lengths(), configs, st.integers(0, 3), st.integers(0, 3))
def test_every_sample_once_in_one_bucket_under_the_budget(
    length: np.ndarray, config: SamplerConfig, seed: int, epoch: int
) -> None:
    plan = epoch_batches(length, config, seed=seed, epoch=epoch)
    assert sorted(plan.sample.tolist()) == list(range(len(length)))
    assert plan.offset[0] == 0
    assert plan.offset[-1] == len(length)
    assert len(batches(plan)) == len(plan) == len(plan.offset) - 1
    top = len(plan.edge) - 2
    for batch, bucket in zip(batches(plan), plan.bucket, strict=True):
        assert 0 < length[batch].sum() <= config.tokens_per_batch
        assert bucket == 0 or (length[batch] > plan.edge[bucket]).all()
        assert bucket == top or (length[batch] <= plan.edge[bucket + 1]).all()
    assert equal(plan, epoch_batches(length, config, seed=seed, epoch=epoch))


@pytest.mark.parametrize("other", [{"seed": 0, "epoch": 1}, {"seed": 1, "epoch": 0}])
def test_epochs_and_seeds_differ_in_composition(other: dict[str, int]) -> None:
    length = np.random.default_rng(0).integers(1, 400, 2000)
    config = SamplerConfig(tokens_per_batch=2048)
    first = epoch_batches(length, config, seed=0, epoch=0)
    second = epoch_batches(length, config, seed=other["seed"], epoch=other["epoch"])
    assert len(composition(first) & composition(second)) < 0.05 * len(first)
    shared = min(len(first), len(second))
    assert (first.bucket[:shared] != second.bucket[:shared]).mean() > 0.2


def test_resume_anywhere_continues_the_stream_across_epochs() -> None:
    length = np.random.default_rng(1).integers(1, 60, 90)
    config = SamplerConfig(tokens_per_batch=120, num_buckets=3)
    num = [len(epoch_batches(length, config, seed=5, epoch=epoch)) for epoch in range(3)]
    straight = list(islice(iterate(length, config, seed=5), sum(num)))
    assert [(x.epoch, x.position) for x in straight] == [
        (epoch, i) for epoch in range(3) for i in range(num[epoch])
    ]
    for start in range(sum(num)):
        resumed = next(iterate(length, config, seed=5, start_batch=start))
        assert resumed[:3] == straight[start][:3]
        assert np.array_equal(resumed.sample, straight[start].sample)
    at_end = next(iterate(length, config, seed=5, start_batch=num[0]))
    assert (at_end.epoch, at_end.position) == (1, 0)


def test_two_interruptions_in_one_epoch_lose_and_repeat_nothing() -> None:
    length = np.full(50, 10)
    config = SamplerConfig(tokens_per_batch=10)
    seen: list[int] = []
    for start, stop in ((0, 13), (13, 22), (22, 50)):
        for batch in islice(iterate(length, config, seed=0, start_batch=start), stop - start):
            assert batch.epoch == 0
            seen += batch.sample.tolist()
    assert seen == epoch_batches(length, config, seed=0, epoch=0).sample.tolist()
    assert sorted(seen) == list(range(50))


@quick
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(0, 5))
@example([1, 1], 0)
@example([60] * 9, 1)
def test_no_prefix_strays_further_than_the_proven_bound(count: list[int], seed: int) -> None:
    label = interleave(np.array(count), np.random.default_rng(seed))
    assert np.bincount(label).tolist() == count
    total, scale = len(label), max(1, 2 * len(count) - 2)
    for j, num in enumerate(count):
        # In integers: |seen - t * num / total| <= 1 - 1 / scale.
        stray = np.abs(np.cumsum(label == j) * total - np.arange(1, total + 1) * num)
        assert (stray * scale <= (scale - 1) * total).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_batches", [100, 15_000])
def test_mix_stays_proportional_within_and_across_epochs(num_batches: int, seed: int) -> None:
    count = np.round(np.array(SHARES) * num_batches).astype(int)
    epochs = [interleave(count, np.random.default_rng((seed, epoch))) for epoch in range(2)]
    stream = np.concatenate(epochs)
    assert longest_run(stream) <= 3
    for window in (32, 64, 128)[: 3 if num_batches > 128 else 1]:
        iid = (len(SHARES) - 1) / (2 * window)
        assert window_deviation(stream, window) < 2
        assert window_deviation(epochs[0], window) < 2
        assert window_kl(stream, window) <= iid / 4
        tail = stream[-max(window, num_batches // 100) :]
        assert np.abs(np.bincount(tail, minlength=6) - len(tail) * np.array(SHARES)).max() < 2
    steps = stream[: len(stream) // 4 * 4].reshape(-1, 4)
    assert (steps.min(axis=1) != steps.max(axis=1)).all()


def test_mix_of_a_packed_epoch_is_proportional_over_its_boundary() -> None:
    length = np.concatenate([np.full(n, 10 * (j + 1)) for j, n in enumerate((30, 70, 400))])
    length = np.repeat(length, 4)
    config = SamplerConfig(tokens_per_batch=60, bucket_edges=(0, 10, 20, 30))
    label = np.array([x.bucket for x in islice(iterate(length, config, seed=0), 1800)])
    assert longest_run(label) <= 1.5 / (1 - np.bincount(label).max() / len(label))
    assert window_deviation(label, 32) < 2


def test_the_plan_of_the_run_with_shares_as_in_the_wild_keeps_all_its_promises() -> None:
    """15,000 micro-batches of six buckets: coverage, budget and mix, also over an epoch's end."""
    edges = (0, 770, 1216, 1728, 2432, 3296, 8192)
    budget = 8192
    rng = np.random.default_rng(0)
    parts = []
    for low, high, share in zip(edges, edges[1:], SHARES, strict=False):
        length = rng.integers(low + (high - low) // 2, high + 1, 15_000 * 8)
        full = np.searchsorted(np.cumsum(length), share * 15_000 * budget * 0.95)
        parts.append(length[: max(full, 1)])
    length = rng.permutation(np.concatenate(parts))
    config = SamplerConfig(tokens_per_batch=budget, bucket_edges=edges)
    plans = [epoch_batches(length, config, seed=0, epoch=epoch) for epoch in range(2)]
    for plan in plans:
        assert np.array_equal(np.sort(plan.sample), np.arange(len(length)))
        assert np.add.reduceat(length[plan.sample], plan.offset[:-1]).max() <= budget
    label = np.concatenate([plan.bucket for plan in plans])
    share = np.bincount(label) / len(label)
    bound = 2 - 1 / (len(SHARES) - 1)
    # Both epochs have the same shares but for a few micro-batches, which the window must bear.
    drift = max(abs(np.bincount(plan.bucket) / len(plan) - share).max() for plan in plans)
    for window in (1, 2, 3, 5, 8, 16, 32, 64, 128, 256):
        assert window_deviation(label, window) <= bound + 2 * drift * window
        boundary = label[len(plans[0]) - window : len(plans[0]) + window]
        assert window_deviation(boundary, window) < 2 * bound
    assert longest_run(label) <= bound / (1 - share.max() - drift)
    end = len(plans[0])
    for start in (end - 1, end, end + 1):
        resumed = next(iterate(length, config, seed=0, start_batch=start))
        epoch, position = divmod(start, end)
        assert (resumed.epoch, resumed.position) == (epoch, position)
        assert np.array_equal(resumed.sample, plans[epoch].batch(position))


@quick
@given(lengths(), configs, st.integers(1, 9), st.integers(0, 3))
def test_few_shards_are_in_flight_and_nothing_else_is_given_up_for_it(
    length: np.ndarray, config: SamplerConfig, in_flight: int, seed: int
) -> None:
    """A shard is in flight from the first micro-batch that reads from it to the last."""
    by_length = np.argsort(np.argsort(-length, kind="stable"))  # as a cache is cut: longest first
    shard = by_length // 20
    config = replace(config, shards_in_flight=in_flight)
    plan = epoch_batches(length, config, seed=seed, epoch=0, shard=shard)
    assert sorted(plan.sample.tolist()) == list(range(len(length)))
    assert all(length[batch].sum() <= config.tokens_per_batch for batch in batches(plan))
    assert np.array_equal(
        np.unique(plan.bucket),
        np.unique(
            epoch_batches(
                length, replace(config, shards_in_flight=0), seed=seed, epoch=0, shard=shard
            ).bucket
        ),
    )
    num_used = len(np.unique(plan.bucket))
    at = np.repeat(np.arange(len(plan)), np.diff(plan.offset))
    allowed = max(1, in_flight // num_used)
    for bucket in np.unique(plan.bucket):
        spans = []
        in_bucket = plan.bucket[at] == bucket
        for one in np.unique(shard[plan.sample][in_bucket]):
            where = at[in_bucket & (shard[plan.sample] == one)]
            spans.append((where.min(), where.max()))
        flying = [sum(a <= i <= b for a, b in spans) for i in range(len(plan))]
        assert max(flying) <= allowed
    if num_used > 1:
        count = np.bincount(plan.bucket)
        seen = np.cumsum(plan.bucket[:, None] == np.arange(len(count)), axis=0)
        due = np.arange(1, len(plan) + 1)[:, None] * count / len(plan)
        assert np.abs(seen - due).max() <= 1 - 1 / (2 * num_used - 2) + 1e-9
    resumed = list(
        islice(iterate(length, config, seed=seed, start_batch=len(plan) - 1, shard=shard), 2)
    )
    assert np.array_equal(resumed[0].sample, plan.batch(len(plan) - 1))
    assert resumed[1].epoch == 1


def test_shards_in_flight_differ_between_epochs() -> None:
    length = np.full(400, 10)
    config = SamplerConfig(tokens_per_batch=40, shards_in_flight=2)
    shard = np.arange(400) // 20
    first = [
        set(shard[epoch_batches(length, config, seed=0, epoch=e, shard=shard).sample[:40]].tolist())
        for e in range(6)
    ]
    assert all(len(shards) == 2 for shards in first)
    assert len({frozenset(shards) for shards in first}) > 3


def test_order_of_the_buckets_differs_between_epochs() -> None:
    count = np.round(np.array(SHARES) * 1000).astype(int)
    epochs = [interleave(count, np.random.default_rng((0, epoch))) for epoch in range(8)]
    differing = [(a != b).mean() for i, a in enumerate(epochs) for b in epochs[:i]]
    assert np.mean(differing) > 0.2
    assert min(differing) > 0


def test_samples_are_not_sorted_within_their_bucket() -> None:
    length = np.arange(1, 1001)
    config = SamplerConfig(tokens_per_batch=4096, num_buckets=1)
    plan = epoch_batches(length, config, seed=0, epoch=0)
    served = length[plan.sample]
    assert abs(np.corrcoef(served[1:], served[:-1])[0, 1]) < 0.2


@pytest.mark.parametrize("num_buckets", [1, 6, 12])
@pytest.mark.parametrize("epoch", range(3))
def test_neighbouring_batches_differ_in_length_and_do_not_drift(
    num_buckets: int, epoch: int
) -> None:
    length = np.repeat(np.arange(1, 1001), 4)
    config = SamplerConfig(tokens_per_batch=4096, num_buckets=num_buckets)
    plan = epoch_batches(length, config, seed=0, epoch=epoch)
    mean = np.array([length[batch].mean() for batch in batches(plan)])
    assert np.corrcoef(mean[1:], mean[:-1])[0, 1] < 0.2
    assert abs(np.corrcoef(mean, np.arange(len(mean)))[0, 1]) < 0.15
    assert order_report(plan, length).fill > 0.9


@pytest.mark.parametrize("num_samples", [1, 7, 8, 9])
def test_odd_bucket_sizes_keep_their_tail(num_samples: int) -> None:
    length = np.concatenate([np.full(num_samples, 10), np.full(9, 20)])
    config = SamplerConfig(tokens_per_batch=80, bucket_edges=(0, 10, 20))
    plan = epoch_batches(length, config, seed=0, epoch=0)
    assert sorted(plan.sample.tolist()) == list(range(num_samples + 9))
    assert np.bincount(plan.bucket).tolist() == [-(-num_samples // 8), -(-9 // 4)]


def test_held_back_samples_close_gaps_that_the_next_in_order_would_leave() -> None:
    length = np.random.default_rng(0).integers(300, 1000, 3000)
    plan = epoch_batches(
        length, SamplerConfig(tokens_per_batch=1000, num_buckets=1), seed=0, epoch=0
    )
    next_fit, left = 0, 0
    for tokens in np.random.default_rng(0).permutation(length):
        next_fit, left = (next_fit, left) if tokens <= left else (next_fit + 1, 1000)
        left -= tokens
    assert len(plan) < 0.9 * next_fit


def test_given_edges_are_kept_and_split_above_the_edge() -> None:
    length = np.array([1, 10, 11, 20, 21, 500])
    config = SamplerConfig(tokens_per_batch=500, bucket_edges=(5, 10, 20, 30))
    plan = epoch_batches(length, config, seed=0, epoch=0)
    assert plan.edge.tolist() == [5, 10, 20, 30]
    where = {
        sample: int(bucket)
        for batch, bucket in zip(batches(plan), plan.bucket, strict=True)
        for sample in batch.tolist()
    }
    assert where == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}


def test_quantile_edges_hold_equal_tokens_not_equal_samples() -> None:
    length = np.array([1] * 80 + [40, 40])
    config = SamplerConfig(tokens_per_batch=100, num_buckets=2)
    assert bucket_edges(length, config).tolist() == [0, 1, 40]
    spread = np.random.default_rng(0).integers(1, 1000, 5000)
    edge = bucket_edges(spread, SamplerConfig(tokens_per_batch=1000, num_buckets=5))
    tokens = np.histogram(spread, bins=edge + 0.5, weights=spread)[0]
    assert len(edge) == 6
    assert np.abs(tokens / spread.sum() - 0.2).max() < 0.01


def test_equal_edges_collapse() -> None:
    config = SamplerConfig(tokens_per_batch=100, num_buckets=6)
    assert bucket_edges(np.full(9, 7), config).tolist() == [0, 7]


@pytest.mark.parametrize(
    ("length", "message"),
    [
        pytest.param(
            [5, 101, 5], "sample 1 of 101 tokens exceeds tokens_per_batch = 100", id="long"
        ),
        pytest.param([150, 101, 120], "sample 0 of 150 tokens exceeds", id="all long"),
        pytest.param([5, 5, 0], "sample 2 is empty", id="empty"),
        pytest.param([], "no sample", id="none"),
    ],
)
def test_refuses_samples_that_fit_no_batch(length: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        epoch_batches(
            np.array(length, dtype=np.int64), SamplerConfig(tokens_per_batch=100), seed=0, epoch=0
        )


def test_refuses_a_single_edge_and_a_negative_start() -> None:
    with pytest.raises(ValueError, match=r"lower and an upper edge, got \[7\]"):
        SamplerConfig(tokens_per_batch=100, bucket_edges=(7,))
    with pytest.raises(ValueError, match="start_batch must not be negative, got -1"):
        next(iterate(np.array([1]), SamplerConfig(tokens_per_batch=9), seed=0, start_batch=-1))


def test_batch_refuses_an_index_outside_the_epoch() -> None:
    plan = epoch_batches(np.array([1, 1]), SamplerConfig(tokens_per_batch=1), seed=0, epoch=0)
    for index in (-1, 2):
        with pytest.raises(IndexError, match="of an epoch of 2"):
            plan.batch(index)


def test_report_of_a_hand_made_plan() -> None:
    plan = EpochPlan(
        sample=np.array([2, 0, 1, 3]),
        offset=np.array([0, 2, 3, 4]),
        bucket=np.array([0, 0, 2], dtype=np.int16),
        edge=np.array([0, 10, 20, 30]),
        tokens_per_batch=40,
    )
    report = order_report(plan, np.array([5, 6, 7, 30]))
    assert (report.num_samples, report.num_tokens, report.num_batches) == (4, 48, 3)
    assert report.longest_run == 2
    assert report.fill == pytest.approx(48 / 120)
    assert report.share == pytest.approx((2 / 3, 0, 1 / 3))
    assert report.window_kl == pytest.approx(0)
    assert "3 micro-batches, 40.0% full" in str(report)


def test_window_divergence_by_hand_and_of_a_shuffle() -> None:
    assert window_kl(np.array([0, 1, 0, 1]), 2) == pytest.approx(0)
    assert window_kl(np.array([0, 0, 1, 1]), 2) == pytest.approx(2 / 3 * np.log(2))
    shuffled = np.random.default_rng(0).choice(6, 20_000, p=SHARES)
    assert window_kl(shuffled, 32) == pytest.approx(5 / 64, rel=0.2)
