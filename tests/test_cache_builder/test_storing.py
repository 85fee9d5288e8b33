"""What the writer's thread stores is what the codec makes of the states, on any device."""

import threading
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from cache_builder import storing
from cache_builder.plan import PlannedSample
from cache_builder.storing import BatchWriter, CapturedBatch
from shared.codec import PRESETS, Codec
from shared.files import sha256_bytes
from shared.shard_writer import ShardWriter
from tests.test_shared.made import bits, make_spec, make_states, open_shard, unit_calibration
from tests.test_shared.made import create_cache as create

SHARD = "0001-00000"

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def planned(num_tokens: int, seed: int) -> PlannedSample:
    ids = np.arange(num_tokens, dtype=np.int32) % 29
    mask = np.ones(num_tokens, np.uint8)
    sample_id = sha256_bytes(bytes([seed]))[:32]
    return PlannedSample(sample_id, split_key=seed, source=0, token_ids=ids, loss_mask=mask)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])
@pytest.mark.parametrize("codec", PRESETS.values(), ids=list(PRESETS))
def test_batches_are_stored_as_the_codec_packs_them(
    codec: Codec, device: str, tmp_path: Path
) -> None:
    spec = make_spec(codec)
    name, calibration = create(tmp_path, spec), unit_calibration(spec)
    lengths = (70, 3, 64, 1, 130)
    samples = [planned(length, seed) for seed, length in enumerate(lengths)]
    states = [make_states(spec, length, seed=seed) for seed, length in enumerate(lengths)]
    broken = states[1].clone()
    broken[2, 1, 3] = torch.nan
    place = torch.device(device)
    files = ShardWriter(tmp_path / "shards.zarr" / SHARD, spec, SHARD)
    on_device = None if calibration is None else calibration.to(place)
    with BatchWriter(files, spec, SHARD, on_device, place) as writer:
        for part in (slice(0, 2), slice(2, 3), slice(3, 5)):
            chosen = [broken if s is states[1] else s for s in states[part]]
            writer.put(CapturedBatch(samples[part], [s.to(place) for s in chosen]))
    assert writer.quarantined == {samples[1].sample_id: "states of block 2 are not finite"}
    record = files.finish(
        layers=writer.sums.statistics(), sources=("made",), calibration=name, quarantined={}
    )
    reader = open_shard(tmp_path, spec, record)
    kept = [i for i in range(5) if i != 1]
    assert [reader.sample_id(row) for row in range(4)] == [samples[i].sample_id for i in kept]
    for row, i in enumerate(kept):
        packed, expected = reader.read(row).packed, codec.pack(states[i], calibration)
        assert torch.equal(packed.planes_PTW, expected.planes_PTW)
        assert torch.equal(packed.outlier_position, expected.outlier_position)
        assert torch.equal(packed.outlier_bits, expected.outlier_bits)
    flat = torch.cat([states[i] for i in kept]).float()
    for layer, found in enumerate(record.layers):
        assert found.max_abs == flat[:, layer].abs().max().item()
        assert found.rms == pytest.approx(flat[:, layer].square().mean().sqrt().item())
    if codec.name == "lossless":
        found = codec.unpack(reader.read(0).packed, None)
        assert np.array_equal(bits(found), bits(states[0]))


def test_a_fault_of_the_device_ends_the_wait_for_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one of these, every call of the device raises, those between two batches too."""

    class Lost:
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(storing, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(BatchWriter, "_store", lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    spec = make_spec(PRESETS["lossless"])
    batch = CapturedBatch([planned(5, 0)], [make_states(spec, 5)])
    raised: list[BaseException] = []

    def capture() -> None:
        files = ShardWriter(tmp_path / SHARD, spec, SHARD)
        writer = BatchWriter(files, spec, SHARD, None, torch.device("cpu"))
        writer._stream = Lost()  # type: ignore[assignment]  # in the place of a stream
        try:
            with writer:
                for _ in range(10):
                    writer.put(batch)
        except RuntimeError as error:
            raised.append(error)
        finally:
            files.close()

    thread = threading.Thread(target=capture, daemon=True)
    thread.start()
    thread.join(300)
    assert not thread.is_alive()
    assert "device-side assert" in str(raised[0])
    assert raised[0].__notes__ == [f"shard {SHARD}"]


def test_what_stops_the_writer_names_shard_and_sample(tmp_path: Path) -> None:
    spec = make_spec(PRESETS["lossless"])
    files = ShardWriter(tmp_path / SHARD, spec, SHARD)
    sample, wrong = planned(5, 0), make_states(spec, 4)
    cpu = torch.device("cpu")
    with (
        pytest.raises(ValueError, match="4 rows of states, 5 tokens") as caught,
        BatchWriter(files, spec, SHARD, None, cpu) as writer,
    ):
        writer.put(CapturedBatch([sample], [wrong]))
    assert caught.value.__notes__ == [f"shard {SHARD}, sample {sample.sample_id}"]
    files.close()
