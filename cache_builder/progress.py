"""How a build is getting on: bars on a terminal, lines elsewhere, and a table at the end."""

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from tqdm import tqdm

from cache_builder.capture import Timing
from cache_builder.pool import worker_names
from shared.manifest import ShardRecord

logger = logging.getLogger(__name__)

_LINE_SECONDS = 30.0
"""Between two lines where there is no terminal."""


@dataclass(slots=True)
class WorkerTotals:
    """What one worker has committed."""

    device: str
    num_shards: int = 0
    num_tokens: int = 0
    stored_bytes: int = 0
    timing: Timing = field(default_factory=Timing)
    bar: "tqdm[None] | None" = None
    open_tokens: int = 0
    """Of the shard at work, not committed yet."""


class Progress:
    """Listens to the workers. A context manager, for the sake of the bars."""

    def __init__(
        self, devices: Sequence[str], shard_tokens: Mapping[str, int], *, raw_bytes_per_token: int
    ) -> None:
        """Follow `devices` through the shards of `shard_tokens`, tokens by shard id."""
        self._shard_tokens = shard_tokens
        self._raw_bytes_per_token = raw_bytes_per_token
        self._planned = sum(shard_tokens.values())
        self._started = self._spoke = time.monotonic()
        self._bar: tqdm[None] | None = None
        self.workers = {
            name: WorkerTotals(device)
            for name, device in zip(worker_names(devices), devices, strict=True)
        }

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            for position, (name, worker) in enumerate(self.workers.items()):
                worker.bar = tqdm(
                    desc=f"{name}: loads the target",
                    unit="tok",
                    unit_scale=True,
                    position=position,
                    leave=False,
                )
            self._bar = tqdm(
                total=self._planned,
                desc="capture",
                unit="tok",
                unit_scale=True,
                position=len(self.workers),
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for bar in (*(worker.bar for worker in self.workers.values()), self._bar):
            if bar is not None:
                bar.close()

    @property
    def num_tokens(self) -> int:
        """Captured so far, committed or not."""
        return sum(worker.num_tokens + worker.open_tokens for worker in self.workers.values())

    def started(self, name: str, shard_id: str) -> None:
        bar = self.workers[name].bar
        if bar is not None:
            bar.reset(self._shard_tokens[shard_id])
            bar.set_description(f"{name}: shard {shard_id}")

    def advanced(self, name: str, tokens: int) -> None:
        worker = self.workers[name]
        worker.open_tokens += tokens
        for bar in (worker.bar, self._bar):
            if bar is not None:
                bar.update(tokens)

    def committed(self, name: str, record: ShardRecord, timing: Timing) -> None:
        worker = self.workers[name]
        # Quarantined samples were captured too, and planned: they count as progress made.
        worker.num_tokens += worker.open_tokens
        worker.open_tokens = 0
        worker.num_shards += 1
        worker.stored_bytes += record.stored_bytes
        worker.timing.add(timing)
        per_token = record.stored_bytes / max(record.num_tokens, 1)
        logger.info(
            "%s: shard %s, %d samples, %d tokens, %.0f bytes/token (%.3f of bf16), %.0f tokens/s",
            name,
            record.shard_id,
            record.num_samples,
            record.num_tokens,
            per_token,
            per_token / self._raw_bytes_per_token,
            record.num_tokens / timing.total,
        )
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._bytes_per_token():,.0f} bytes/token")

    def died(self, name: str) -> None:
        """What the worker had told of its shard has to be captured by another."""
        worker = self.workers[name]
        if self._bar is not None:
            self._bar.update(-worker.open_tokens)
        worker.open_tokens = 0
        if worker.bar is not None:
            worker.bar.set_description(f"{name}: dead")

    def tick(self) -> None:
        """A line, where there is no terminal and the last one is old enough."""
        now = time.monotonic()
        if self._bar is None and now - self._spoke >= _LINE_SECONDS:
            self._spoke = now
            logger.info("%s", self.line(now - self._started))

    def line(self, seconds: float) -> str:
        """The state after `seconds` of capture."""
        done = self.num_tokens
        rate = done / seconds if seconds else 0.0
        left = f"{(self._planned - done) / rate / 60:,.1f} minutes left" if rate else "no rate yet"
        return (
            f"captured {done:,} of {self._planned:,} tokens "
            f"({100 * done / max(self._planned, 1):.1f} %), {rate:,.0f} tokens/s, "
            f"{self._bytes_per_token():,.0f} bytes/token, {left}"
        )

    def report(self) -> list[str]:
        """Lines of a table: per worker its throughput and where its time went; then the sum."""
        lines = [
            f"{'worker':<20} {'shards':>6} {'tokens':>12} {'tokens/s':>9} {'forward':>8} "
            f"{'waiting':>8} {'pack':>6} {'encode+write':>13}"
        ]
        total = Timing()
        for name, worker in self.workers.items():
            total.add(worker.timing)
            lines.append(
                f"{name:<20} {worker.num_shards:>6} {worker.num_tokens:>12,} "
                f"{worker.num_tokens / (worker.timing.total or 1.0):>9,.0f} "
                + _shares(worker.timing)
            )
        elapsed = time.monotonic() - self._started
        tokens = sum(worker.num_tokens for worker in self.workers.values())
        lines.append(
            f"{tokens:,} tokens in {elapsed:,.1f} s with loading the target: "
            f"{tokens / elapsed:,.0f} tokens/s, {self._bytes_per_token():,.0f} bytes/token"
        )
        behind = total.pack + total.write + total.commit
        lines.append(
            f"pack, encode and write took {100 * behind / (total.total or 1.0):.1f} % of the time, "
            f"{100 * total.critical / (total.total or 1.0):.1f} % on the critical path of the "
            "forward; the rest ran beside it"
        )
        return lines

    def _bytes_per_token(self) -> float:
        tokens = sum(worker.num_tokens for worker in self.workers.values())
        return sum(worker.stored_bytes for worker in self.workers.values()) / max(tokens, 1)


def _shares(timing: Timing) -> str:
    """Percent of the worker's time; the last two beside the forward, not instead of it."""
    total = timing.total or 1.0
    percent = [
        f"{100 * seconds / total:.1f} %"
        for seconds in (timing.forward, timing.critical, timing.pack, timing.write)
    ]
    return f"{percent[0]:>8} {percent[1]:>8} {percent[2]:>6} {percent[3]:>13}"
