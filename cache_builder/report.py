"""The account of a dataset: what became of every row."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cache_builder.conversation import DropReason

MAX_EXAMPLES = 8
UNKNOWN_MODEL = "unknown"


@dataclass(frozen=True, slots=True)
class Dropped:
    """Rows left out for one reason."""

    count: int
    examples: tuple[str, ...]
    """Where the first of them are, and what is wrong there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusReport:
    """What became of every row read: `num_rows` is `num_kept` plus `num_dropped`."""

    num_rows: int
    num_kept: int
    num_tokens: int
    num_supervised_tokens: int
    num_truncated: int
    """Samples cut at the maximum length."""

    num_cut_off: int
    """Rows whose last answer hit a limit when it was generated, kept or not."""

    num_straddling_tokens: int
    """Tokens across the edge of an answer, unsupervised."""

    num_unthinking: int
    """Answers without a think block where the template arguments ask for one."""

    num_unsupervised_turns: int
    """Earlier answers whose recorded reasoning the template leaves out."""

    dropped: Mapping[DropReason, Dropped]
    sources: Mapping[str, int]
    """Samples kept of each source."""

    generated_by: Mapping[str, int]
    """Samples kept by the model that wrote the answers; `unknown` where the row does not say."""

    @property
    def num_dropped(self) -> int:
        return sum(dropped.count for dropped in self.dropped.values())

    @property
    def num_duplicates(self) -> int:
        duplicates = self.dropped.get(DropReason.DUPLICATE)
        return duplicates.count if duplicates else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **{name: getattr(self, name) for name in self.__slots__},
            "dropped": {
                str(reason): {"count": dropped.count, "examples": list(dropped.examples)}
                for reason, dropped in self.dropped.items()
            },
            "sources": dict(self.sources),
            "generated_by": dict(self.generated_by),
        }

    def describe(self) -> list[str]:
        """Lines for a person: totals, and every reason with its count and first places."""
        lines = [
            f"{self.num_rows} rows: {self.num_kept} samples, {self.num_tokens} tokens, "
            f"{self.num_supervised_tokens} supervised; {self.num_dropped} dropped, "
            f"{self.num_truncated} truncated, {self.num_cut_off} answers cut off"
        ]
        for reason, dropped in self.dropped.items():
            lines.append(f"dropped {dropped.count} {reason}: {dropped.examples[0]}")
        return lines


class Tally:
    """Counts rows while they are read."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        self.generated_by: Counter[str] = Counter()
        self._dropped: Counter[DropReason] = Counter()
        self._examples: dict[DropReason, list[str]] = {}

    def keep(self, *, source: str, generated_by: str | None, **totals: int) -> None:
        """Count one sample, adding each of `totals` to the field of that name."""
        self.sources[source] += 1
        self.generated_by[generated_by or UNKNOWN_MODEL] += 1
        self.totals.update(num_kept=1, **totals)

    def drop(self, reason: DropReason, example: str) -> None:
        self._dropped[reason] += 1
        examples = self._examples.setdefault(reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(example)

    def report(self) -> CorpusReport:
        """What was counted so far."""
        names = [name for name in CorpusReport.__slots__ if name.startswith("num_")]
        return CorpusReport(
            **{name: self.totals[name] for name in names},
            dropped={
                reason: Dropped(count, tuple(self._examples[reason]))
                for reason, count in self._dropped.most_common()
            },
            sources=dict(sorted(self.sources.items())),
            generated_by=dict(sorted(self.generated_by.items())),
        )
