"""Metrics of a run: a line of JSON per step on disk, and W&B beside it when asked for.

`metrics.jsonl` is the truth and nothing is left out of it. W&B is fed through a queue by a
daemon thread: it may be slow, blocked or dead and no step waits for it.
"""

import json
import logging
import math
import os
import queue
import secrets
import threading
import time
from pathlib import Path
from typing import Any, Self

from shared.errors import RunError
from shared.files import write_bytes, write_json, writing
from trainer.config import TrackingConfig

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
WANDB_RUN = "wandb.json"
QUEUE_STEPS = 10_000
INIT_TIMEOUT_SECONDS = 30.0


class Tracker:
    """Where the loop puts what it measured. Use as a context manager, or call `finish`."""

    def __init__(
        self,
        run_dir: Path,
        config: TrackingConfig,
        run_config: dict[str, Any],
        start_step: int = 0,
    ) -> None:
        """Open `run_dir/metrics.jsonl` to go on after `start_step`, the step of the checkpoint.

        Later lines are cut off, since those steps are about to be done again; from step 0 the
        file starts empty.

        Raises:
            DraftCacheError: it cannot be read or written.
        """
        self.path = run_dir / METRICS
        with writing(self.path):
            run_dir.mkdir(parents=True, exist_ok=True)
            self._step, num_steps_back = _cut(self.path, start_step)
            self._file = self.path.open("ab", buffering=0)
        self._unwritten = b""
        self._wandb = (
            None if config.wandb == "off" else _Wandb(run_dir, config, run_config, num_steps_back)
        )

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Record `metrics` of `step`: one line, one write, no waiting for W&B.

        A NaN or infinite number becomes null in the file, which stays valid JSON. Lines that
        the disk refuses are kept and written with the next one.

        Raises:
            ValueError: `step` is not after the step before.
            TypeError: a value is not JSON-able.
        """
        if step <= self._step:
            raise ValueError(f"step must be greater than {self._step}, the last one, got {step}")
        record = {"step": step, **metrics}
        if self._wandb is not None:
            record["tracking/wandb_dropped"] = self._wandb.num_dropped
        self._unwritten += json.dumps(finite(record), allow_nan=False).encode() + b"\n"
        self._step = step
        self._write()
        if self._wandb is not None:
            self._wandb.offer(record)

    def is_in_place(self) -> bool:
        """Whether the file is still found at its path: neither moved, deleted nor replaced."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # the disk's fault, of which writing will tell
            return True

    def sync(self) -> None:
        """Make the lines so far survive a loss of power. For just before a checkpoint."""
        self._write()  # what a full disk delayed
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            logger.warning("%s: %s", self.path, error)

    def finish(self, timeout: float = 30.0) -> None:
        """Close the file, and give W&B `timeout` seconds to take what is queued.

        A W&B that is stuck is left behind; its own exit hook may then hold up the end of the
        process, by about `INIT_TIMEOUT_SECONDS`.

        Raises:
            RunError: lines could not be written to the end.
        """
        if self._file.closed:
            return
        self._write()
        self.sync()
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish(timeout)
        if self._unwritten:
            num_lines = self._unwritten.count(b"\n")
            raise RunError(
                f"{self.path}: the last {num_lines} lines could not be written. Make room, then "
                "run the same command again from the last checkpoint."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.finish()
        except RunError as error:
            if kind is None:
                raise
            logger.warning("%s", error)  # the error on its way out matters more

    def _write(self) -> None:
        was_behind = self._unwritten.count(b"\n") > 1
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not was_behind:
                logger.warning("%s: %s. Keeping the lines to write them later.", self.path, error)


class _Wandb:
    """One W&B run, continued by every process that trains in the same run directory."""

    def __init__(
        self, run_dir: Path, config: TrackingConfig, run_config: dict[str, Any], num_steps_back: int
    ) -> None:
        self._run_dir = run_dir
        self._config = config
        self._run_config = run_config
        self._num_steps_back = num_steps_back
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(QUEUE_STEPS)
        self._num_offered = 0
        self._num_full = 0
        self._num_failed = 0
        self._num_sent = 0
        self._thread = threading.Thread(target=self._main, name="wandb", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Steps that W&B will never see."""
        return self._num_full + self._num_failed

    def offer(self, record: dict[str, Any]) -> None:
        # Lists (sample ids, accuracy per slot) are for the file; W&B would chart none of them.
        record = {key: value for key, value in record.items() if not isinstance(value, list)}
        self._num_offered += 1
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._num_full += 1

    def finish(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            pass
        else:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.warning("W&B did not finish within %g s and is left behind.", timeout)
        if missing := self._num_offered - self._num_sent:
            logger.warning(
                "W&B missed %d of %d steps. %s has all of them.",
                missing,
                self._num_offered,
                self._run_dir / METRICS,
            )

    def _main(self) -> None:
        # Whatever W&B raises costs its own points and nothing else, hence the broad excepts.
        run, row_offset = None, 0
        try:
            import wandb

            try:
                run, row_offset = self._start(wandb)
            finally:
                if run is None:
                    wandb.teardown()  # its service would hold up the end of the process
        except Exception as error:
            logger.warning(
                "W&B could not be started (%s: %s). Training goes on without it.",
                type(error).__name__,
                error,
            )
        while (record := self._queue.get()) is not None:
            if run is not None and self._send(run, record, row_offset + record["step"]):
                self._num_sent += 1
            else:
                self._num_failed += 1
        try:
            if run is not None:
                run.finish()
                # Without it the last block of an offline run may reach the disk too late.
                wandb.teardown()
        except Exception as error:
            logger.warning("W&B did not finish cleanly (%r)", error)

    def _send(self, run: Any, record: dict[str, Any], row: int) -> bool:
        try:
            run.log(record, step=row)
        except Exception as error:
            if self._num_failed == 0:
                logger.warning("W&B refused step %d (%r)", record["step"], error)
            return False
        return True

    def _start(self, wandb: Any) -> tuple[Any, int]:
        """The open run, and what to add to a step to get W&B's own row number.

        W&B ignores a row whose number is not above the last one, also one of an earlier
        process. A resumed run repeats steps, so its rows are numbered on from the rows sent.
        """
        path = self._run_dir / WANDB_RUN
        known = json.loads(path.read_bytes()) if path.exists() else {}
        identity = {
            "id": known.get("id", secrets.token_hex(4)),
            "row_offset": known.get("row_offset", 0) + self._num_steps_back,
        }
        write_json(path, identity)
        mode = self._config.wandb
        # The mode is decided before anything else, and `silent` rules out a prompt for a key.
        wandb.setup(
            wandb.Settings(mode=mode, silent=True, console="off", init_timeout=INIT_TIMEOUT_SECONDS)
        )
        run = wandb.init(
            project=self._config.project,
            name=self._config.name,
            id=identity["id"],
            dir=self._run_dir,
            config=self._run_config,
            mode=mode,
            resume="allow" if mode == "online" else None,
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        logger.info("W&B run %s, %s", identity["id"], run.url or run.dir)
        return run, identity["row_offset"]


def finite(value: Any) -> Any:
    """`value` with null for every number that is NaN or infinite: JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _cut(path: Path, start_step: int) -> tuple[int, int]:
    """Leave in `path` the whole lines up to `start_step`, all in one replacement.

    Returns:
        The last step left, -1 if none, and by how many steps that is behind the last one found.
    """
    data = path.read_bytes() if path.exists() else b""
    kept, last, furthest, num_broken = [], -1, -1, 0
    for line in data.splitlines():
        try:
            step = int(json.loads(line)["step"])
        except (ValueError, LookupError, TypeError):
            num_broken += 1
            continue
        furthest = max(furthest, step)
        if start_step > 0 and step <= start_step:
            kept.append(line + b"\n")
            last = step
    if num_broken:
        logger.warning("%s: dropped %d lines that were cut short", path, num_broken)
    if furthest > last:
        logger.info("%s: cut the lines of steps %d to %d", path, last + 1, furthest)
    if (whole := b"".join(kept)) != data:
        write_bytes(path, whole)
    return last, furthest - last
