"""The account of a dataset: what became of every row."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cache_builder.conversation import Drop, DropReason
from shared.quantity import count

CHOSEN_DROPS = frozenset(
    {DropReason.TOO_LONG, DropReason.CUT_OFF, DropReason.DUPLICATE, DropReason.NOT_CHOSEN}
)
"""Drops that the configuration asks for: no fault of the row."""

MAX_EXAMPLES = 8
_MAX_PLACES = 3
_MAX_DETAIL = 160
LARGE_SHARE = 0.01
"""Share of unusable rows above which something is likely to be wrong with the data as a whole."""

UNKNOWN_MODEL = "unknown"


@dataclass(frozen=True, slots=True)
class Dropped:
    """Rows left out for one reason."""

    count: int
    examples: tuple[str, ...]
    """Where the first of them are, and what is wrong there."""

    places: tuple[str, ...]
    """Where the first of them are: `file:row`."""


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
    def num_unusable(self) -> int:
        """Dropped rows that the configuration did not ask to drop."""
        return sum(d.count for reason, d in self.dropped.items() if reason not in CHOSEN_DROPS)

    @property
    def num_duplicates(self) -> int:
        return self._count(DropReason.DUPLICATE)

    def _count(self, reason: DropReason) -> int:
        return self.dropped[reason].count if reason in self.dropped else 0

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

    def describe(self) -> str:
        """The totals as a line."""
        return (
            f"{count(self.num_rows, 'row')}: {count(self.num_kept, 'sample')}, "
            f"{count(self.num_tokens, 'token')}, {self.num_supervised_tokens:,} supervised; "
            f"{self.num_dropped:,} dropped, {self.num_truncated:,} truncated, "
            f"{count(self.num_cut_off, 'answer')} cut off"
        )

    def describe_drops(self) -> list[str]:
        """A table of the reasons with their counts and first places; nothing if none was dropped.

        Its last line says so if a large share of the rows cannot be used.
        """
        if not self.dropped:
            return []
        width = max(len("dropped"), *(len(reason) for reason in self.dropped))
        lines = [f"{'dropped':<{width}}  {'rows':>9}  first"]
        for reason, dropped in self.dropped.items():
            first = dropped.examples[0]
            first = first if len(first) <= _MAX_DETAIL else f"{first[:_MAX_DETAIL]}..."
            also = ", ".join(dropped.places[1:_MAX_PLACES])
            more = f" (also {also}{', ...' * (dropped.count > _MAX_PLACES)})" if also else ""
            lines.append(f"{reason:<{width}}  {dropped.count:>9,}  {first}{more}")
        chosen = self.num_rows - self._count(DropReason.NOT_CHOSEN)
        if self.num_unusable >= LARGE_SHARE * chosen > 0:
            lines.append(
                f"{100 * self.num_unusable / chosen:.1f} % of the rows cannot be used "
                f"({self.num_unusable:,} of {chosen:,}): look at the reasons above."
            )
        return lines


class Tally:
    """Counts rows while they are read."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        self.generated_by: Counter[str] = Counter()
        self._dropped: Counter[DropReason] = Counter()
        self._examples: dict[DropReason, list[tuple[str, str]]] = {}

    def keep(self, *, source: str, generated_by: str | None, **totals: int) -> None:
        """Count one sample, adding each of `totals` to the field of that name."""
        self.sources[source] += 1
        self.generated_by[generated_by or UNKNOWN_MODEL] += 1
        self.totals.update(num_kept=1, **totals)

    def drop(self, place: str, drop: Drop) -> None:
        """Count one row; `place` is its `file:row`."""
        self._dropped[drop.reason] += 1
        examples = self._examples.setdefault(drop.reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append((place, drop.detail))

    def report(self) -> CorpusReport:
        """What was counted so far."""
        names = [name for name in CorpusReport.__slots__ if name.startswith("num_")]
        return CorpusReport(
            **{name: self.totals[name] for name in names},
            dropped={
                reason: Dropped(
                    number,
                    tuple(f"{place}: {detail}" for place, detail in self._examples[reason]),
                    tuple(place for place, _ in self._examples[reason]),
                )
                for reason, number in self._dropped.most_common()
            },
            sources=dict(sorted(self.sources.items())),
            generated_by=dict(sorted(self.generated_by.items())),
        )
