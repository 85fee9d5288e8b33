"""Micro-batches come in sampler order with the right states, whatever the threads do."""

import hashlib
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.cache import Cache
from shared.codec import PRESETS, Codec
from shared.errors import CacheError, ShardCorruptError
from shared.shard import StoredSample
from tests.test_shared.made import make_cache, make_spec
from trainer.anchors import draw_anchors
from trainer.batch import Batch, Features, collate
from trainer.caches import Caches
from trainer.config import LoaderConfig, SamplerConfig
from trainer.loader import Loader
from trainer.recipe import AnchorConfig
from trainer.sampler import PlannedBatch, iterate

SECONDS = 600
"""What is waited for at most."""

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


class Gate:
    """Reads that wait until they are let through; the others pass. Counts what was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, holds: Callable[[Cache, int], bool]):
        self._open = threading.Event()
        self.num_reads = 0
        self.num_held = 0
        lock, original = threading.Lock(), Cache.read

        def read(cache: Cache, position: int) -> StoredSample:
            held = holds(cache, position) and not self._open.is_set()
            with lock:
                self.num_reads += 1
                self.num_held += held
            if held:
                assert self._open.wait(SECONDS)
            return original(cache, position)

        monkeypatch.setattr(Cache, "read", read)

    def let_through(self) -> None:
        self._open.set()


def open_loader(cache: Caches, stream: Iterable[PlannedBatch], threads: int, queue: int) -> Loader:
    return Loader(
        cache,
        np.arange(len(cache.index)),
        iter(stream),
        config=LoaderConfig(num_threads=threads, queue_batches=queue),
        anchors=AnchorConfig(per_sample=8),
        seed=1,
    )


def wait_until(condition: Callable[[], bool], message: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.005)


def ready(loader: Loader) -> list[bool]:
    return [future.done() for future in loader._pending]


def of(*samples: int) -> PlannedBatch:
    return PlannedBatch(epoch=0, position=0, bucket=0, sample=np.array(samples))


def drain(loader: Loader, batches: list[Batch]) -> None:
    for batch in loader:
        batches.append(batch)


def is_alive(loader: Loader) -> bool:
    """Whether any of its threads is."""
    return any(thread.is_alive() for thread in loader._pool._threads)


def test_a_slow_sample_holds_up_its_own_batch_only(
    tiny_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one thread is stuck, the other fills the queue behind it; order is kept."""
    cache = Caches([tiny_cache])
    expected = load(cache, 8)
    slow = next(iter(planned(cache, 1))).sample[0]
    gate = Gate(monkeypatch, lambda _, position: position == slow)
    with open_loader(cache, planned(cache, 8), threads=2, queue=4) as loader:
        loader._fill()
        wait_until(lambda: ready(loader) == [False, True, True, True], "those behind it wait")
        gate.let_through()
        batches = list(loader)
    assert all(same(a, b) for a, b in zip(batches, expected, strict=True))


def test_a_slow_shard_holds_up_the_batches_that_need_it_only(
    tiny_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread more than it has batches in the queue is enough to read all the others."""
    cache = Caches([tiny_cache])
    shards = cache.index.shard
    slow, others = np.flatnonzero(shards == shards[0]), np.flatnonzero(shards != shards[0])
    stream = [of(slow[0]), of(others[0]), of(slow[1], others[1]), *map(of, others[2:7])]
    with open_loader(cache, stream, threads=1, queue=1) as loader:
        expected = list(loader)
    gate = Gate(monkeypatch, lambda cache, position: position in slow)
    with open_loader(cache, stream, threads=3, queue=8) as loader:
        loader._fill()
        wait_until(lambda: ready(loader) == [False, True, False] + [True] * 5, "others wait")
        gate.let_through()
        assert all(same(a, b) for a, b in zip(loader, expected, strict=True))


def test_a_slow_worker_holds_up_the_batch_it_has_only(
    tiny_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is free takes the next batch; none is assigned to the slow one beforehand."""
    cache = Caches([tiny_cache])
    expected = load(cache, 20)
    slow: list[str] = []

    def holds(_: Cache, __: int) -> bool:
        name = threading.current_thread().name
        slow.append(name)
        return name == slow[0]

    gate = Gate(monkeypatch, holds)
    with open_loader(cache, planned(cache, 20), threads=2, queue=20) as loader:
        loader._fill()
        wait_until(lambda: sum(ready(loader)) == 19, "the other worker does not take them all")
        assert gate.num_held == 1
        gate.let_through()
        assert all(same(a, b) for a, b in zip(loader, expected, strict=True))


def test_two_sources_of_different_speed_come_in_the_order_of_the_sampler(
    tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow source takes the threads it needs, never a turn of the fast one, nor its share."""
    slow_path = tmp_path / "slow"
    shutil.copytree(tiny_cache, slow_path)
    cache = Caches([tiny_cache, slow_path])
    size = len(cache.index) // 2
    stream = [of(size), of(0), of(1), of(size + 1), *map(of, range(2, 10))]
    stream += [of(n % size + size * (n % 3 == 0)) for n in range(60)]
    with open_loader(cache, stream, threads=1, queue=1) as loader:
        expected = list(loader)
    gate = Gate(monkeypatch, lambda cache, _: cache.path == slow_path)
    with open_loader(cache, stream, threads=3, queue=12) as loader:
        loader._fill()
        wait_until(
            lambda: ready(loader) == [False, True, True, False] + [True] * 8, "the fast one waits"
        )
        assert gate.num_held == 2
        gate.let_through()
        assert all(same(a, b) for a, b in zip(loader, expected, strict=True))


def test_memory_is_steady_over_a_thousand_batches(tiny_cache: Path) -> None:
    """No batch outlives its step, and the process does not grow: all of them would be 57 MB."""
    cache = Caches([tiny_cache])
    alive: list[weakref.ref[torch.Tensor]] = []
    resident, num_bytes = {}, 0
    with open_loader(cache, planned(cache, 1000), threads=2, queue=4) as loader:
        for number, batch in enumerate(loader, 1):
            alive = [ref for ref in alive if ref() is not None] + [
                weakref.ref(batch.packed.planes_PTW)
            ]
            assert len(alive) <= 3  # this one, and what the frames of the loader still name
            num_bytes += batch.packed.planes_PTW.nbytes * (number > 200)
            if number in (200, 1000) and Path("/proc/self/statm").exists():
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                resident[number] = pages * os.sysconf("SC_PAGE_SIZE")
    assert number == 1000
    if resident:
        assert num_bytes > 30e6
        assert resident[1000] - resident[200] < num_bytes / 4


def digest(batches: Iterable[Batch]) -> str:
    parts = [(b.sample_ids, b.anchor_A.tolist(), b.packed.planes_PTW.numpy()) for b in batches]
    whole = hashlib.sha256()
    for ids, anchors, planes in parts:
        whole.update(repr((ids, anchors)).encode() + planes.tobytes())
    return whole.hexdigest()


def load_elsewhere(path: Path, pipe: Connection) -> None:
    """In a spawned process: the same batches."""
    pipe.send(digest(load(Caches([path]), 20)))


def read_elsewhere(cache: Caches, pipe: Connection) -> None:
    """In a forked process: the samples, from the files that its parent has open.

    Not a loader: torch's own threads do not survive a fork ("Invalid thread pool").
    """
    pipe.send([cache.read(n).packed.planes_PTW.numpy().tobytes() for n in range(20)])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_that_are_forked_or_spawned_read_the_same(tiny_cache: Path, method: str) -> None:
    """From a process whose own loader is open, while that loader goes on."""
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"needs {method}")
    context: Any = multiprocessing.get_context(method)
    cache = Caches([tiny_cache])
    expected: Any = digest(load(cache, 20))
    ours, theirs = context.Pipe(duplex=False)
    with open_loader(cache, planned(cache, 20), threads=2, queue=4) as loader:
        batches = iter(loader)
        first = [next(batches) for _ in range(5)]
        wait_until(lambda: all(ready(loader)), "the queue does not fill")
        arguments: Any = (load_elsewhere, (tiny_cache, theirs))
        if method == "fork":
            arguments = (read_elsewhere, (cache, theirs))
        process = context.Process(target=arguments[0], args=arguments[1])
        process.start()
        theirs.close()
        rest = list(batches)  # both read at the same time
        assert ours.poll(SECONDS)
        found = ours.recv()
        process.join(SECONDS)
        assert process.exitcode == 0
    assert digest(first + rest) == expected
    if method == "fork":
        expected = [cache.read(n).packed.planes_PTW.numpy().tobytes() for n in range(20)]
    assert found == expected


def test_ctrl_c_ends_the_loader_at_once_and_leaves_no_thread(
    tiny_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the consumer waits: what is being read is finished, what is queued is not begun."""
    cache = Caches([tiny_cache])
    gate = Gate(monkeypatch, lambda *_: True)

    def interrupt() -> None:
        wait_until(
            lambda: gate.num_held == 2 and loader._pool._work_queue.qsize() == 18, "no reads"
        )
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        wait_until(lambda: bool(interrupted), "Ctrl-C was not seen")
        gate.let_through()

    interrupted: list[bool] = []
    shutdown = ThreadPoolExecutor.shutdown

    def noting(pool: ThreadPoolExecutor, **options: bool) -> None:
        interrupted.append(True)
        shutdown(pool, **options)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", noting)
    loader = open_loader(cache, [of(number) for number in range(20)], threads=2, queue=20)
    helper = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        helper.start()
        with pytest.raises(KeyboardInterrupt), loader:
            next(iter(loader))
    finally:
        signal.signal(signal.SIGINT, before)
    helper.join()
    assert not is_alive(loader)
    assert gate.num_reads == 2


@pytest.mark.parametrize(
    ("error", "expected", "said"),
    [
        (OSError(5, "Input/output error"), CacheError, "{} cannot be read .*Input/output error"),
        (MemoryError("out of it"), CacheError, "{} cannot be read .*out of it"),
        (ShardCorruptError("shard a: torn"), ShardCorruptError, "sample {}: shard a: torn"),
        (RuntimeError("a bug"), RuntimeError, "a bug\nwhile sample {} of .* was read"),
    ],
)
def test_the_death_of_a_worker_ends_the_loader_and_names_the_sample(
    error: Exception,
    expected: type[Exception],
    said: str,
    tiny_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the batches before it, which are whole; nothing is left running."""
    cache = Caches([tiny_cache])
    original = Cache.read

    def read(self: Cache, position: int) -> StoredSample:
        if position == 4:
            raise error
        return original(self, position)

    monkeypatch.setattr(Cache, "read", read)
    batches: list[Batch] = []
    with (
        pytest.raises(expected) as caught,
        open_loader(cache, [of(number) for number in range(20)], threads=2, queue=8) as loader,
    ):
        drain(loader, batches)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(said.format(cache.index.sample_id(4)), text)
    assert [b.sample_ids for b in batches] == [(cache.index.sample_id(n),) for n in range(4)]
    assert not is_alive(loader)


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_batches_reach_a_gpu_as_they_were_read(tiny_cache: Path) -> None:
    cache, device = Caches([tiny_cache]), torch.device("cuda:0")
    expected = [Features(cache, torch.device("cpu")).unpack(batch) for batch in load(cache, 20)]
    features, found = Features(cache, device), []
    with Loader(
        cache,
        np.arange(len(cache.index)),
        planned(cache, 20),
        config=LoaderConfig(num_threads=2, queue_batches=2),
        anchors=AnchorConfig(per_sample=8),
        seed=1,
        pin=True,
    ) as loader:
        for batch in loader:
            assert batch.packed.planes_PTW.is_pinned()
            found.append(features.unpack(batch.to(device)))
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left.cpu(), right, rtol=1e-2, atol=1e-6)
