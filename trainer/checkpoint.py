"""Checkpoints: whole directories on disk, or none.

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
import os
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import RunError
from shared.files import (
    canonical_json,
    commit_directory,
    listed,
    remove_tree,
    sha256_bytes,
    sha256_file,
    write_json,
)
from trainer.snapshot import Snapshot, json_copy

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
CHECKPOINTS = "checkpoints"
DRAFTER = "drafter.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
SCORED_ON = "scored_on"
"""In the state: digest of the held-out samples that the score is of."""

_FIELDS = ("step", "batch_position", "score", "state", "config", "cache")


class _DamagedError(RunError):
    """A file of a checkpoint is not what was written."""


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
        payload["digest"] = sha256_bytes(canonical_json(json_copy(payload)))
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


def best_valid(run_dir: Path) -> Path:
    """The checkpoint of the highest score, as rotation keeps it: of equal ones the newest.

    Only scores on the same held-out samples as the newest one count.

    Raises:
        RunError: there is none with a score, or it is damaged.
    """
    found = _scored(_checkpoints(run_dir / CHECKPOINTS))
    if not found:
        raise RunError(
            f"{run_dir}: no checkpoint has a score, since none was evaluated when it was saved. "
            "Set evaluate.every_steps, or take the newest."
        )
    path = found[-1]
    describe(path)
    return path


def all_paths(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, whole or damaged, by step."""
    return _checkpoints(run_dir / CHECKPOINTS)


def describe(path: Path) -> dict[str, Any]:
    """What `state.json` of the checkpoint `path` says, all files compared with their digests.

    Raises:
        RunError: a file is damaged or missing, or the format version is another.
    """
    payload = _read_state(path)
    _check_files(path, payload)
    return payload


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
    paths = [path for path in _checkpoints(newest.parent) if step_of(path) <= step_of(newest)]
    kept = {*paths[-keep:], *_scored(paths)[-1:]}
    for path in paths:
        if path not in kept:
            # Renamed first: a kill halfway must not leave something that looks damaged.
            remove_tree(path.rename(path.with_name(f"{path.name}.rotated.partial")))


def _scored(paths: list[Path]) -> list[Path]:
    """Those whose scores may be compared with the newest one, the best last.

    What cannot be read has no score. Scores on other held-out samples than the newest are left
    out: `evaluate.max_samples` may change when a run is resumed.
    """
    scored = []
    for path in paths:
        try:
            payload = _read_state(path)
        except RunError:
            continue
        if payload["score"] is not None:
            scored.append((payload["score"], path, payload["state"].get(SCORED_ON)))
    return [
        path
        for _, path, samples in sorted(scored, key=lambda each: (each[0], step_of(each[1])))
        if samples == scored[-1][2]
    ]


def _checkpoints(directory: Path) -> list[Path]:
    """Checkpoint directories, oldest first."""
    found = [path for path in listed(directory) if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
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
