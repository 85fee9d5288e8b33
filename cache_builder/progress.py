"""How a build is getting on: bars on a terminal, lines elsewhere, and a table at the end."""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import TracebackType

from tqdm import tqdm

from cache_builder.capture import Timing
from shared import log
from shared.bar import LINE_SECONDS
from shared.manifest import ShardRecord
from shared.quantity import duration

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class WorkerTotals:
    """What one worker has committed."""

    num_shards: int = 0
    num_tokens: int = 0
    stored_bytes: int = 0
    timing: Timing = field(default_factory=Timing)
    bar: "tqdm[None] | None" = None
    open_tokens: int = 0
    """Of the shard at work, not committed yet."""


class Progress:
    """Listens to the workers. A context manager, for the sake of the bars."""

    def __init__(self, shard_tokens: Mapping[str, int], *, raw_bytes_per_token: int) -> None:
        """Follow the workers that join through the shards of `shard_tokens`, tokens by shard id."""
        self._shard_tokens = shard_tokens
        self._raw_bytes_per_token = raw_bytes_per_token
        self._planned = sum(shard_tokens.values())
        self._started = self._spoke = time.monotonic()
        self._bar: tqdm[None] | None = None
        self.workers: dict[str, WorkerTotals] = {}

    def __enter__(self) -> "Progress":
        if log.shows_bars():
            self._bar = tqdm(
                total=self._planned, desc="capture", unit="tok", unit_scale=True, position=0
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

    def joined(self, name: str) -> None:
        worker = self.workers[name] = WorkerTotals()
        logger.info("", extra=log.event("joined", worker=name))
        if self._bar is not None:
            worker.bar = tqdm(
                desc=f"{name}: loads the target",
                unit="tok",
                unit_scale=True,
                position=len(self.workers),
                leave=False,
            )

    def started(self, name: str, shard_id: str) -> None:
        tokens = self._shard_tokens[shard_id]
        logger.info(
            "", extra=log.event("started", worker=name, shard=shard_id, planned_tokens=tokens)
        )
        bar = self.workers[name].bar
        if bar is not None:
            bar.reset(tokens)
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
            extra=log.event(
                "committed",
                worker=name,
                shard=record.shard_id,
                samples=record.num_samples,
                tokens=record.num_tokens,
                quarantined=len(record.quarantined),
                bytes_per_token=per_token,
                stored_over_raw=per_token / self._raw_bytes_per_token,
                tokens_per_second=record.num_tokens / timing.total,
                seconds=asdict(timing),
            ),
        )
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._bytes_per_token():,.0f} bytes/token")

    def died(self, name: str, how: str) -> None:
        """What the worker had told of its shard has to be captured by another."""
        logger.info("", extra=log.event("died", worker=name, reason=how))
        worker = self.workers[name]
        if self._bar is not None:
            self._bar.update(-worker.open_tokens)
        worker.open_tokens = 0
        if worker.bar is not None:
            worker.bar.set_description(f"{name}: dead")

    def tick(self) -> None:
        """A line, where there is no terminal and the last one is old enough."""
        now = time.monotonic()
        if self._bar is None and now - self._spoke >= LINE_SECONDS:
            self._spoke = now
            seconds = now - self._started
            extra = log.event("progress", **self.state(seconds))
            logger.info("%s", self.line(seconds), extra=extra)

    def state(self, seconds: float) -> dict[str, float | int | None]:
        """Where the capture is after `seconds`: tokens, rates, what is left."""
        done = self.num_tokens
        rate = done / seconds if seconds else 0.0
        return {
            "tokens": done,
            "planned_tokens": self._planned,
            "shards": sum(worker.num_shards for worker in self.workers.values()),
            "planned_shards": len(self._shard_tokens),
            "tokens_per_second": rate,
            "bytes_per_token": self._bytes_per_token(),
            "seconds": seconds,
            "eta_seconds": (self._planned - done) / rate if rate else None,
        }

    def line(self, seconds: float) -> str:
        """`state` in words."""
        state = self.state(seconds)
        eta = state["eta_seconds"]
        left = "no rate yet" if eta is None else f"{duration(eta)} left"
        return (
            f"captured {self.num_tokens:,} of {self._planned:,} tokens "
            f"({100 * self.num_tokens / max(self._planned, 1):.1f} %), "
            f"{state['tokens_per_second']:,.0f} tokens/s, "
            f"{state['bytes_per_token']:,.0f} bytes/token, {left}"
        )

    def log_report(self) -> None:
        """Write the table into the log."""
        for line in self.report():
            logger.info("%s", line)
        workers = {
            name: {
                "shards": worker.num_shards,
                "tokens": worker.num_tokens,
                "bytes": worker.stored_bytes,
                "seconds": asdict(worker.timing),
            }
            for name, worker in self.workers.items()
        }
        state = self.state(time.monotonic() - self._started)
        logger.info("", extra=log.event("report", **state, workers=workers))

    def report(self) -> list[str]:
        """Lines of a table: per worker its throughput and where its time went; then the sum.

        Tokens and times are those of committed shards.
        """
        width = max([20, *map(len, self.workers)])
        lines = [
            f"{'worker':<{width}} {'shards':>6} {'tokens':>12} {'tokens/s':>9} {'forward':>8} "
            f"{'waiting':>8} {'pack':>6} {'encode+write':>13}"
        ]
        total = Timing()
        for name, worker in self.workers.items():
            total.add(worker.timing)
            lines.append(
                f"{name:<{width}} {worker.num_shards:>6} {worker.num_tokens:>12,} "
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
