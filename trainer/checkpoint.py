"""Checkpoints: a snapshot in memory, whole directories on disk, a thread in between.

    <run>/checkpoints/step-00000123/
        drafter.safetensors     the drafter's state dict
        optimizer.safetensors   AdamW: exp_avg.<name>, exp_avg_sq.<name>, step.<name>
        state.json              the rest, a digest of each file and one of itself; written last

A directory is written aside, made durable and renamed, so a kill at any moment leaves whole
checkpoints and at most one `*.partial`, which the next `CheckpointWriter` removes. Nothing is
pickled. No random state is kept: the trainer draws everything from (seed, step).
"""

import json
import logging
import math
import os
import re
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shared.errors import RunError
from shared.files import (
    canonical_json,
    commit_directory,
    remove_tree,
    sha256_bytes,
    sha256_file,
    write_json,
)
from trainer.config import CheckpointConfig

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
CHECKPOINTS = "checkpoints"
DRAFTER = "drafter.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_FIELDS = ("step", "batch_position", "score", "state", "config", "cache")


class _DamagedError(RunError):
    """A file of a checkpoint is not what was written."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Snapshot:
    """All that a run needs to go on as if it had never stopped. Shares no memory with it."""

    step: int
    """Optimizer steps done."""

    batch_position: int
    """Position of the next micro-batch in the sampler's stream."""

    drafter: dict[str, Tensor]
    """The state dict, on the host, without the prefixes of `torch.compile`."""

    optimizer: dict[str, Tensor]
    """Per parameter `exp_avg.<name>`, `exp_avg_sq.<name>` and `step.<name>`, on the host."""

    config: dict[str, Any]
    cache: dict[str, Any]
    """Fingerprint and generation of the cache trained from."""

    state: dict[str, Any]
    """Whatever else the loop must remember. JSON-able."""

    score: float | None = None
    """Held-out figure of these very weights, higher is better: rotation keeps the best."""


def take_snapshot(
    *,
    step: int,
    batch_position: int,
    drafter: nn.Module,
    optimizer: torch.optim.AdamW,
    config: dict[str, Any],
    cache: dict[str, Any],
    state: dict[str, Any] | None = None,
    score: float | None = None,
) -> Snapshot:
    """Copy the run's state to host memory; training may go on as soon as this returns.

    A non-finite `score` counts as none.

    Raises:
        TypeError, ValueError: `config`, `cache` or `state` is not JSON-able or holds NaN.
    """
    moments: dict[str, Tensor] = {}
    for name, parameter in _named_parameters(optimizer):
        # A parameter without a gradient so far has no state yet, which AdamW reads as zeros.
        held = optimizer.state.get(parameter) or {
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
            "step": torch.tensor(0.0),
        }
        moments |= {f"{moment}.{name}": held[moment] for moment in _MOMENTS}
    snapshot = Snapshot(
        step=step,
        batch_position=batch_position,
        drafter=_to_host({_plain(key): value for key, value in drafter.state_dict().items()}),
        optimizer=_to_host(moments),
        config=_json_copy(config),
        cache=_json_copy(cache),
        state=_json_copy(state or {}),
        score=score if score is not None and math.isfinite(score) else None,
    )
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return snapshot


def save(run_dir: Path, snapshot: Snapshot, *, keep: int) -> Path:
    """Write `snapshot` as a new checkpoint, then delete all but the `keep` newest and the best.

    Raises:
        OSError: the disk refused; the checkpoints before this one are untouched.
        RunError: a whole checkpoint of this step with other weights is there already.
    """
    final = run_dir / CHECKPOINTS / f"step-{snapshot.step:08d}"
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f"{final.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(exist_ok=True)
        payload = {name: getattr(snapshot, name) for name in _FIELDS} | {
            "format_version": FORMAT_VERSION,
            "files": {
                DRAFTER: _write_tensors(partial / DRAFTER, snapshot.drafter),
                OPTIMIZER: _write_tensors(partial / OPTIMIZER, snapshot.optimizer),
            },
        }
        payload["digest"] = sha256_bytes(canonical_json(_json_copy(payload)))
        write_json(partial / STATE, payload)
        _publish(partial, final, payload)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _rotate(final, keep)
    return final


def newest_valid(run_dir: Path) -> Path | None:
    """The newest checkpoint whose files match their digests; None if there is none at all.

    Changes nothing, so it may look at a run in progress. A damaged checkpoint is named in a
    warning and the one before it is tried.

    Raises:
        RunError: there are checkpoints and all are damaged, or one has another format version.
    """
    paths = _checkpoints(run_dir / CHECKPOINTS)
    for path in reversed(paths):
        try:
            _check_files(path, _read_state(path))
        except _DamagedError as error:
            logger.warning("%s Trying the checkpoint before it.", error)
        else:
            return path
    if paths:
        raise RunError(
            f"{run_dir / CHECKPOINTS}: none of {len(paths)} checkpoints is whole. "
            "Start a new run directory, or delete this one to begin again at step 0."
        )
    return None


def load(path: Path, *, verify: bool = True) -> Snapshot:
    """Read the checkpoint directory `path`.

    Args:
        path: as returned by `save` and `newest_valid`.
        verify: False skips the digests of the tensor files, for a path that `newest_valid`
            has just returned.

    Raises:
        RunError: a file is damaged or missing, or the format version is another.
    """
    payload = _read_state(path)
    if verify:
        _check_files(path, payload)
    try:
        return Snapshot(
            drafter=load_file(path / DRAFTER),
            optimizer=load_file(path / OPTIMIZER),
            **{name: payload[name] for name in _FIELDS},
        )
    except (KeyError, OSError, SafetensorError) as error:
        raise _DamagedError(f"{path}: cannot be read ({error!r}).") from error


def restore(
    snapshot: Snapshot, drafter: nn.Module, optimizer: torch.optim.AdamW | None = None
) -> None:
    """Put the snapshot's tensors into `drafter` and `optimizer`, bit for bit.

    Nothing is changed unless all fits. Learning rate and other settings stay as they are: they
    come from the configuration and the step.

    Raises:
        RunError: a tensor is missing, unknown, or of another shape or dtype.
    """
    keys = {_plain(key): key for key in drafter.state_dict()}
    _require_same(
        "drafter",
        snapshot.step,
        expected={_plain(key): value for key, value in drafter.state_dict().items()},
        found=snapshot.drafter,
    )
    drafter_state = {keys[name]: value for name, value in snapshot.drafter.items()}
    if optimizer is None:
        drafter.load_state_dict(drafter_state)
        return

    named = _named_parameters(optimizer)
    _require_same(
        "optimizer",
        snapshot.step,
        expected={
            f"{moment}.{name}": torch.tensor(0.0) if moment == "step" else parameter
            for name, parameter in named
            for moment in _MOMENTS
        },
        found=snapshot.optimizer,
    )
    drafter.load_state_dict(drafter_state)
    # Clones, because load_state_dict keeps a tensor that is on the right device already.
    moments = {
        index: {moment: snapshot.optimizer[f"{moment}.{name}"].clone() for moment in _MOMENTS}
        for index, (name, _) in enumerate(named)
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})


class CheckpointWriter:
    """Writes snapshots from a thread of its own, one at a time.

    A save that the disk refuses costs a warning and its own checkpoint; `max_failures` of them
    in a row end the run. Use as a context manager, or call `close`.

    Attributes:
        wait_seconds: time that `submit` has spent waiting for the save before, so far.
        num_failures: saves that have failed in a row.
    """

    def __init__(self, run_dir: Path, config: CheckpointConfig) -> None:
        """Removes what a killed process left half written, so make one per run directory."""
        for partial in (run_dir / CHECKPOINTS).glob("*.partial"):
            logger.info("removing %s, left by a save that was cut short", partial)
            remove_tree(partial)
        self.wait_seconds = 0.0
        self.num_failures = 0
        self._run_dir = run_dir
        self._config = config
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._save: Future[None] | None = None
        self._error: OSError | None = None

    def submit(self, snapshot: Snapshot) -> None:
        """Save `snapshot` in the background. Waits only while the save before is unfinished.

        Raises:
            RunError: `max_failures` saves in a row have failed.
        """
        self._wait()
        self.check()
        self._save = self._executor.submit(self._write, snapshot)

    def check(self) -> None:
        """Raise what the saves finished so far call for. Costs nothing; ask it every step.

        Raises:
            RunError: `max_failures` saves in a row have failed.
        """
        if self._save is not None and self._save.done():
            self._save.result()
        if self.num_failures >= self._config.max_failures:
            raise RunError(
                f"{self._run_dir / CHECKPOINTS}: {self.num_failures} checkpoints in a row could "
                f"not be written ({self._error}). The ones before them are kept: make room or "
                "repair the disk, then run the same command again."
            ) from self._error

    def close(self) -> None:
        """Wait for the last save.

        Raises:
            RunError: it failed, so the end of the run is not on disk.
        """
        self._wait()
        self._executor.shutdown()
        self.check()
        if self._error is not None:
            raise RunError(
                f"{self._run_dir / CHECKPOINTS}: the last checkpoint could not be written "
                f"({self._error}). Run the same command again to redo the steps since the one "
                "before it."
            ) from self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # the error on its way out matters more; a failed save has been logged
            self._executor.shutdown()

    def _wait(self) -> None:
        if self._save is not None and not self._save.done():
            started = time.perf_counter()
            wait([self._save])
            self.wait_seconds += time.perf_counter() - started

    def _write(self, snapshot: Snapshot) -> None:
        started = time.perf_counter()
        try:
            path = save(self._run_dir, snapshot, keep=self._config.keep)
        except OSError as error:
            self._error = error
            self.num_failures += 1
            logger.warning(
                "checkpoint of step %d was not written (%s): failure %d in a row, %d end the "
                "run. The checkpoints before it are kept.",
                snapshot.step,
                error,
                self.num_failures,
                self._config.max_failures,
            )
        else:
            self._error = None
            self.num_failures = 0
            logger.info("wrote %s in %.1f s", path, time.perf_counter() - started)


def _plain(name: str) -> str:
    """`name` without the prefixes that `torch.compile` puts around a module."""
    return name.replace("_orig_mod.", "")


def _named_parameters(optimizer: torch.optim.AdamW) -> list[tuple[str, Tensor]]:
    """Plain name and parameter, in the order of the optimizer's own state dict."""
    return [
        (_plain(name), parameter)
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    ]


def _to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory: pinned and not waited for where they come from CUDA."""
    return {
        name: torch.empty_like(
            tensor, device="cpu", pin_memory=tensor.is_cuda, memory_format=torch.contiguous_format
        ).copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        for name, tensor in tensors.items()
    }


def _json_copy(value: Any) -> Any:
    """What reading `value` back from JSON will give."""
    return json.loads(canonical_json(value))


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # what it makes of a full disk, too
        raise OSError(f"{path}: {error}") from error
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _publish(partial: Path, final: Path, payload: dict[str, Any]) -> None:
    """Make the finished directory `partial` the checkpoint `final`."""
    aside = final.with_name(f"{final.name}.damaged.partial")
    if final.exists():  # a run that fell back behind a damaged checkpoint arrives at it again
        try:
            found = _read_state(final)
            _check_files(final, found)
        except _DamagedError:
            final.rename(aside)
        else:
            if found["files"] != payload["files"]:
                raise RunError(
                    f"{final}: there is a checkpoint of this step with other weights. "
                    "Give each run its own directory."
                )
            write_json(final / STATE, payload)
            return
    commit_directory(partial, final)
    remove_tree(aside)


def _rotate(newest: Path, keep: int) -> None:
    """Delete the checkpoints before `newest`, except the `keep` newest and the best of all."""
    paths = [path for path in _checkpoints(newest.parent) if _step(path) <= _step(newest)]
    scored = []
    for path in paths:
        try:
            score = _read_state(path)["score"]
        except RunError:
            continue
        if score is not None:
            scored.append((score, _step(path), path))
    kept = {*paths[-keep:], *(path for _, _, path in sorted(scored)[-1:])}
    for path in paths:
        if path not in kept:
            # Renamed first: a kill halfway must not leave something that looks damaged.
            remove_tree(path.rename(path.with_name(f"{path.name}.rotated.partial")))


def _checkpoints(directory: Path) -> list[Path]:
    """Checkpoint directories, oldest first."""
    return sorted(
        (path for path in directory.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)),
        key=_step,
    )


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _read_state(path: Path) -> dict[str, Any]:
    try:
        data = (path / STATE).read_bytes()
        payload: dict[str, Any] = json.loads(data)
        digest = payload.pop("digest")
        is_whole = data.endswith(b"}\n") and digest == sha256_bytes(canonical_json(payload))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _DamagedError(f"{path / STATE}: cannot be read ({error}).") from error
    if not is_whole:
        raise _DamagedError(f"{path / STATE}: its content does not match its digest.")
    if (version := payload.get("format_version")) != FORMAT_VERSION:
        raise RunError(
            f"{path}: expected a checkpoint of format version {FORMAT_VERSION}, found {version!r}. "
            "Resume with the release that wrote it."
        )
    return payload


def _check_files(path: Path, payload: dict[str, Any]) -> None:
    for name, expected in payload["files"].items():
        try:
            found = {"bytes": (path / name).stat().st_size}
            if found["bytes"] == expected["bytes"]:
                found["sha256"] = sha256_file(path / name)
        except OSError as error:
            raise _DamagedError(f"{path / name}: cannot be read ({error}).") from error
        for key, value in found.items():
            if value != expected[key]:
                raise _DamagedError(
                    f"{path / name}: expected {key} {expected[key]}, found {value}."
                )


def _require_same(
    what: str, step: int, *, expected: dict[str, Tensor], found: dict[str, Tensor]
) -> None:
    def described(tensors: dict[str, Tensor], name: str) -> str:
        if name not in tensors:
            return "nothing"
        return f"{str(tensors[name].dtype).removeprefix('torch.')}{list(tensors[name].shape)}"

    problems = [
        f"{name} (expected {described(expected, name)}, found {described(found, name)})"
        for name in sorted(expected.keys() | found.keys())
        if described(expected, name) != described(found, name)
    ]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise RunError(
            f"checkpoint of step {step}: the {what} does not fit this configuration: "
            f"{', '.join(problems[:8])}{more}. Resume with the configuration that wrote it."
        )
