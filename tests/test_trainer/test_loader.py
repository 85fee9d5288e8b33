"""Micro-batches come in sampler order with the right states, whatever the threads do."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.cache import Cache
from shared.codec import PRESETS, Codec
from shared.errors import ShardCorruptError
from tests.test_shared.made import make_cache, make_spec
from trainer.anchors import draw_anchors
from trainer.batch import Batch, Features, collate
from trainer.caches import Caches
from trainer.config import LoaderConfig, SamplerConfig
from trainer.loader import Loader
from trainer.recipe import AnchorConfig
from trainer.sampler import PlannedBatch, iterate

SAMPLER = SamplerConfig(tokens_per_batch=512, num_buckets=3)


def planned(cache: Caches, count: int, start: int = 0) -> Iterator[PlannedBatch]:
    stream = iterate(cache.index.num_tokens.astype(np.int64), SAMPLER, seed=1, start_batch=start)
    for _ in range(count):
        yield next(stream)


def load(cache: Caches, count: int, *, threads: int = 2, start: int = 0) -> list[Batch]:
    with Loader(
        cache,
        np.arange(len(cache.index)),
        planned(cache, count, start),
        config=LoaderConfig(num_threads=threads, queue_batches=4),
        anchors=AnchorConfig(per_sample=8),
        seed=1,
    ) as loader:
        return list(loader)


def same(left: Batch, right: Batch) -> bool:
    return left.sample_ids == right.sample_ids and all(
        torch.equal(a, b)
        for a, b in [
            (left.token_ids_S, right.token_ids_S),
            (left.anchor_A, right.anchor_A),
            (left.packed.planes_PTW, right.packed.planes_PTW),
            (left.packed.outlier_position, right.packed.outlier_position),
        ]
    )


def test_a_row_holds_whole_samples_with_their_own_states_positions_and_anchors(
    tiny_cache: Path,
) -> None:
    cache = Caches([tiny_cache])
    features = Features(cache, torch.device("cpu"))
    positions = {cache.index.sample_id(i): i for i in range(len(cache.index))}
    for batch in load(cache, 20):
        states_SLD = features.unpack(batch)
        assert batch.num_tokens <= 512
        begin = 0
        anchors = []
        for document, sample_id in enumerate(batch.sample_ids):
            sample = cache.read(positions[sample_id])
            end = begin + len(sample.token_ids)
            assert batch.token_ids_S[begin:end].tolist() == sample.token_ids.tolist()
            assert batch.loss_mask_S[begin:end].tolist() == sample.loss_mask.astype(bool).tolist()
            assert batch.document_S[begin:end].unique().tolist() == [document]
            assert batch.position_S[begin:end].tolist() == list(range(end - begin))
            assert torch.equal(states_SLD[begin:end], cache.unpack(sample))
            drawn = draw_anchors(
                sample.loss_mask.astype(bool),
                seed=1,
                epoch=batch.epoch,
                sample_id=sample_id,
                limit=8,
            )
            anchors += (drawn + begin).tolist()
            begin = end
        assert begin == batch.num_tokens
        assert batch.anchor_A.tolist() == anchors


@pytest.mark.parametrize("codec", PRESETS.values(), ids=list(PRESETS))
def test_samples_of_every_codec_lie_side_by_side(codec: Codec, tmp_path: Path) -> None:
    """Each sample has outliers of its own, and one alone in its run of a calibration too."""
    make_cache(tmp_path, make_spec(codec), [[5, 3, 70]])
    cache = Cache(tmp_path)
    samples = [cache.read(position) for position in range(3)]
    expected = [cache.unpack(sample) for sample in samples]
    batch = collate(samples, [np.zeros(1, np.int64)] * 3, epoch=0, bucket=0)
    name = samples[0].calibration
    for runs in (((name, 78),), ((name, 5), (name, 8), (name, 78))):
        found = Features(cache, torch.device("cpu")).unpack(replace(batch, calibrations=runs))
        assert torch.equal(found, torch.cat(expected))
    assert (found[[0, 5, 8], :, 0] == 29_056.0).all()


def test_batches_do_not_depend_on_the_number_of_threads(tiny_cache: Path) -> None:
    cache = Caches([tiny_cache])
    one, four = load(cache, 30, threads=1), load(cache, 30, threads=4)
    assert len(one) == len(four) == 30
    assert all(same(a, b) for a, b in zip(one, four, strict=True))


def test_a_loader_started_later_continues_the_same_stream(tiny_cache: Path) -> None:
    cache = Caches([tiny_cache])
    whole = load(cache, 30)
    assert all(same(a, b) for a, b in zip(whole[17:], load(cache, 13, start=17), strict=True))


def test_a_slow_sample_holds_up_its_own_batch_only(
    tiny_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one thread is stuck, the other fills the queue behind it; order is kept."""
    cache = Caches([tiny_cache])
    expected = load(cache, 8)
    slow = next(iter(planned(cache, 1))).sample[0]
    release = threading.Event()
    original = Cache.read

    def read(self: Cache, position: int) -> object:
        if position == slow:
            assert release.wait(20)
        return original(self, position)

    monkeypatch.setattr(Cache, "read", read)
    with Loader(
        cache,
        np.arange(len(cache.index)),
        planned(cache, 8),
        config=LoaderConfig(num_threads=2, queue_batches=4),
        anchors=AnchorConfig(per_sample=8),
        seed=1,
    ) as loader:
        loader._fill()
        deadline = time.monotonic() + 20
        while sum(future.done() for future in loader._pending) < 3:
            assert time.monotonic() < deadline, "batches behind the slow one were not loaded"
            time.sleep(0.01)
        assert not loader._pending[0].done()
        release.set()
        batches = list(loader)
    assert all(same(a, b) for a, b in zip(batches, expected, strict=True))


def test_the_queue_is_bounded(tiny_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Caches([tiny_cache])
    count = 0

    def stream() -> Iterator[PlannedBatch]:
        nonlocal count
        for batch in planned(cache, 30):
            count += 1
            yield batch

    with Loader(
        cache,
        np.arange(len(cache.index)),
        stream(),
        config=LoaderConfig(num_threads=2, queue_batches=3),
        anchors=AnchorConfig(per_sample=8),
        seed=1,
    ) as loader:
        iterator = iter(loader)
        for taken in range(1, 6):
            next(iterator)
            assert count <= taken + 3
        stats = loader.take_stats()
        assert 0 <= stats.queue_depth <= 3
        assert stats.wait_seconds >= 0


def test_a_damaged_sample_stops_the_loader_with_its_place(tiny_cache: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "cache"
    shutil.copytree(tiny_cache, copy)
    states = next(copy.rglob("hidden_states/c/0/0/0"))
    data = bytearray(states.read_bytes())
    data[len(data) // 2] ^= 4
    states.write_bytes(data)
    with pytest.raises(ShardCorruptError, match=rf"shard {states.parents[4].name}"):
        load(Caches([copy]), 40)


def test_outliers_move_with_their_sample_in_the_row(tiny_cache: Path) -> None:
    cache = Caches([tiny_cache])
    samples = [cache.read(0), cache.read(1)]
    spiked = []
    for sample in samples:
        hidden = cache.unpack(sample).clone()
        hidden[1, 1, 7] = 29440.0
        packed = cache.codec.pack(hidden, cache.calibration(sample.calibration))
        object.__setattr__(sample, "packed", packed)
        spiked.append(hidden)
    batch = collate(samples, [np.array([0]), np.array([1])], epoch=0, bucket=0)
    states_SLD = Features(cache, torch.device("cpu")).unpack(batch)
    assert len(batch.packed.outlier_bits) >= 2
    for row in (1, len(spiked[0]) + 1):
        assert states_SLD[row, 1, 7] == 29440.0
