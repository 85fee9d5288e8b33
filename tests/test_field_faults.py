"""Faults that others' pipelines had in the field, each as its report describes it."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache_builder import build as building
from cache_builder.build import build
from cache_builder.config import BuildConfig
from cache_builder.publication import publish
from cache_builder.verify import verify_cache
from shared.cache import Cache
from shared.errors import CacheLockedError, ConfigError, DraftCacheError, NonFiniteError, RunError
from shared.files import canonical_json, read_json, sha256_bytes, write_json
from shared.layout import DESCRIPTION, MANIFEST
from shared.manifest import Manifest
from tests.conftest import REPOSITORY, conversations, write_jsonl
from tests.test_cache_builder.stored import assert_clean, contents
from tests.test_shared.made import add_shard, make_sample, make_states
from trainer.checkpoint import STATE, newest_valid
from trainer.config import TrainConfig
from trainer.export import export_dflash
from trainer.run import Run
from trainer.train import train

pytestmark = pytest.mark.slow

MakeBuild = Callable[..., BuildConfig]
MakeTrain = Callable[..., TrainConfig]


@pytest.fixture
def copy(tiny_cache: Path, tmp_path: Path) -> Path:
    path = tmp_path / "copy"
    shutil.copytree(tiny_cache, path)
    return path


def test_a_cache_that_lost_its_taps_trains_nothing(
    copy: Path, tiny_train: MakeTrain, tmp_path: Path
) -> None:
    """The list of layers is deleted and everything is signed anew: no formula takes its place."""
    description, manifest = read_json(copy / DESCRIPTION), Cache(copy).manifest
    del description["spec"]["target_layer_ids"]
    description["fingerprint"] = sha256_bytes(canonical_json(description["spec"]))
    write_json(copy / DESCRIPTION, description)
    signed = replace(manifest, fingerprint=description["fingerprint"])
    write_json(copy / MANIFEST, signed.to_dict())
    assert Manifest.from_dict(read_json(copy / MANIFEST), "here") == signed
    with pytest.raises(DraftCacheError, match="missing key 'target_layer_ids'"):
        train(tiny_train(tmp_path / "run", copy, steps=1))


def test_a_checkpoint_that_lost_its_taps_is_neither_resumed_nor_exported(
    tiny_cache: Path, tiny_train: MakeTrain, tmp_path: Path
) -> None:
    config = tiny_train(tmp_path / "run", tiny_cache, steps=2)
    train(config)
    newest = newest_valid(tmp_path / "run")
    assert newest is not None
    state = read_json(newest / STATE)
    del state["cache"]["target_layer_ids"], state["digest"]
    data = json.dumps({**state, "digest": sha256_bytes(canonical_json(state))}, indent=2)
    (newest / STATE).write_text(data + "\n")
    longer = replace(config, train=replace(config.train, steps=4))
    for command in (
        lambda: train(longer),
        lambda: export_dflash(Run(tmp_path / "run"), tmp_path / "out"),
    ):
        with pytest.raises(RunError, match="'target_layer_ids' is missing"):
            command()
    assert not (tmp_path / "out").exists()


def test_nan_in_a_finished_cache_is_found_and_stops_training_by_sample(
    copy: Path, tiny_train: MakeTrain, tmp_path: Path
) -> None:
    """Every digest is right: a builder without our checks may have stored it."""
    cache, victim = Cache(copy), "0002-00000"
    name, hidden_TLD = cache.description["calibration"], make_states(cache.spec, 40)
    hidden_TLD[3, 1, 5] = torch.nan
    ids, calibration = range(10, 50), cache.calibration(name)
    sample = make_sample(cache.spec, hidden_TLD, token_ids=ids, calibration=calibration)
    add_shard(copy, cache.spec, victim, [sample], calibration=name)
    publish(copy, cache.spec)
    problems = [p for p in verify_cache(copy, deep=True) if p.piece == "shard"]
    assert {(problem.kind, problem.shard) for problem in problems} == {("not_finite", victim)}
    config = tiny_train(tmp_path / "run", copy, steps=40)
    with pytest.raises(NonFiniteError) as error:
        train(config)
    named = [path.read_text() for path in (tmp_path / "run").glob("nonfinite-*.json")]
    assert any(sample.sample_id in text for text in [str(error.value), *named])


def test_float16_is_no_choice(tiny_build: MakeBuild, tmp_path: Path) -> None:
    from shared import config as configs

    fields = configs.to_dict(tiny_build(tmp_path))
    fields["target"]["dtype"] = "float16"
    with pytest.raises(ConfigError, match=r"target\.dtype.*'bfloat16', 'float32'.*'float16'"):
        configs.build(BuildConfig, fields)


def test_prompts_that_share_a_prefix_have_a_state_for_each_of_their_own_tokens(
    tiny_build: MakeBuild, tmp_path: Path
) -> None:
    """No prefix is reused: both are captured as if each were alone."""
    shared_words = "the cache holds states of a small target and every drafter reads"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{shared_words} {end}"},
                {"role": "assistant", "content": f"all of it {end}"},
            ]
        }
        for end in ("once", "again", "once")
    ]
    both = tmp_path / "both"
    build(tiny_build(both, preset="lossless", data=[write_jsonl(tmp_path / "both.jsonl", rows)]))
    stored = contents(both)
    assert len(stored) == 2  # the same prompt twice is one sample
    for number, row in enumerate(rows[:2]):
        alone = tmp_path / f"alone-{number}"
        data = write_jsonl(tmp_path / f"{number}.jsonl", [row])
        build(tiny_build(alone, preset="lossless", data=[data]))
        ((sample_id, sample),) = contents(alone).items()
        found = np.frombuffer(stored[sample_id][8], np.int16).astype(np.int32) << 16
        expected = np.frombuffer(sample[8], np.int16).astype(np.int32) << 16
        assert len(found) == len(expected) == len(sample[1]) * 2 * 64
        np.testing.assert_allclose(
            found.view(np.float32), expected.view(np.float32), rtol=0.01, atol=0.01
        )


def _build(config: BuildConfig, gate: Any, is_refused: Any) -> None:
    """Build as soon as all have come, and not before another one was refused."""
    open_or_create = building.open_or_create

    def look_around(path: Path, *rest: Any) -> Any:
        assert is_refused.wait(300)
        return open_or_create(path, *rest)

    building.open_or_create = look_around  # the first step that is done with the lock
    gate.wait()
    try:
        build(config)
    except CacheLockedError:
        is_refused.set()
        sys.exit(7)


def test_builders_started_at_the_same_instant_make_one_cache(
    tiny_build: MakeBuild, tmp_path: Path
) -> None:
    """On a directory that is not there: one builds, the others are refused or find it done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers.models.qwen3.modeling_qwen3"])
    data = write_jsonl(tmp_path / "data.jsonl", conversations(range(8)))
    for number in range(3):
        gates = context.Barrier(4), context.Event()
        config = tiny_build(tmp_path / f"cache-{number}", data=[data])
        builders = [context.Process(target=_build, args=(config, *gates)) for _ in range(4)]
        for builder in builders:
            builder.start()
        for builder in builders:
            builder.join()
        assert {builder.exitcode for builder in builders} == {0, 7}
        assert Cache(config.cache.path).manifest.generation == 1
        assert_clean(config.cache.path)


_BUILD_AND_LIST = """
import os, sys
from pathlib import Path
written = set()
def hook(event, values):
    if event == "open" and isinstance(values[2], int) and values[2] & (os.O_WRONLY | os.O_RDWR):
        if isinstance(values[0], (str, bytes, os.PathLike)):
            written.add(os.path.abspath(os.fsdecode(values[0])))
    if event == "os.mkdir":
        written.add(os.path.abspath(os.fsdecode(values[0])))
sys.addaudithook(hook)
from cache_builder.__main__ import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print("\\n".join(sorted(written)), file=open(os.environ["WRITTEN"], "w"))
"""


def test_a_build_writes_below_the_cache_only(
    tiny_target: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """The home directory cannot be written: no library may fill another disk than the cache's."""
    cache, listed, config = tmp_path / "cache", tmp_path / "written", tmp_path / "build.toml"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    config.write_text(
        f'[cache]\npath = "{cache}"\nmin_free_gb = 0\n'
        f'[target]\npath = "{tiny_target}"\ndtype = "float32"\n'
        f'[data]\nsources = ["{tiny_data}"]\nmax_length = 256\n[capture]\n'
        "target_layer_ids = [0, 2]\n[workers]\nnum_workers = 1\n"
    )
    environment = {
        **{
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("XDG", "HF_", "TORCH"))
        },
        "HOME": "/proc/nowhere",
        "TMPDIR": str(temporary),
        "HF_HUB_OFFLINE": "1",
        "WRITTEN": str(listed),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    subprocess.run(
        [sys.executable, "-c", _BUILD_AND_LIST, "build", "--config", str(config)],
        env=environment,
        cwd=REPOSITORY,
        check=True,
    )
    written = [Path(line) for line in listed.read_text().split("\n") if line]
    assert any(path.is_relative_to(cache) for path in written)
    allowed = (cache, temporary, listed, Path("/dev"))
    assert not [path for path in written if not any(map(path.is_relative_to, allowed))]
    assert not [path for path in temporary.rglob("*") if path.is_file()]


def test_no_states_become_python_lists(
    tiny_build: MakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One value after the other in Python is what made others' devices wait."""
    original, largest = torch.Tensor.tolist, [0]

    def counted(self: torch.Tensor) -> Any:
        largest[0] = max(largest[0], self.numel())
        return original(self)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    build(tiny_build(tmp_path / "cache"))
    assert largest[0] < 64  # less than one token of one layer
