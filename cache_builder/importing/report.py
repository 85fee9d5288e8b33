"""The account of an import: what became of every sample of the source."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from cache_builder.importing.source import SampleSkippedError, SourceTokens
from shared.errors import DataError
from shared.quantity import count

MAX_EXAMPLES = 8


@dataclass(slots=True)
class ScanReport:
    """What the first pass over the source found. `num_seen` is `num_kept` plus the skipped."""

    num_seen: int = 0
    num_kept: int = 0
    num_tokens: int = 0
    num_supervised_tokens: int = 0
    num_padding: int = 0
    """Positions of padding that were left out."""

    num_cached: int = 0
    """Of the kept: samples that are in the cache already."""

    dtypes: Counter[str] = field(default_factory=Counter)
    """Samples kept by the type that their states are stored in."""

    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    """By reason: the first of what was skipped for it."""

    def keep(self, sample: SourceTokens, *, is_cached: bool) -> None:
        self.num_kept += 1
        self.num_tokens += len(sample.token_ids)
        self.num_supervised_tokens += int(sample.loss_mask.sum())
        self.num_padding += sample.num_padding
        self.num_cached += is_cached
        self.dtypes[str(sample.shape.dtype).removeprefix("torch.")] += 1

    def skip(self, error: SampleSkippedError) -> None:
        self.skipped[str(error.reason)] += 1
        examples = self.examples.setdefault(str(error.reason), [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(error.detail)

    def require_any(self, where: str) -> None:
        """Refuse a source of which nothing can be imported.

        Raises:
            DataError: with every reason and an example of it.
        """
        if not self.num_kept:
            reasons = "; ".join(
                f"{number} {reason} ({self.examples[reason][0]})"
                for reason, number in self.skipped.most_common()
            )
            raise DataError(f"{where}: none of {self.num_seen} samples can be imported: {reasons}.")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **{name: getattr(self, name) for name in self.__slots__ if name.startswith("num_")},
            "dtypes": dict(self.dtypes),
            "skipped": {
                reason: {"count": number, "examples": self.examples[reason]}
                for reason, number in self.skipped.most_common()
            },
        }


def rows(scan: dict[str, Any]) -> list[tuple[str, str]]:
    """What `ScanReport.to_dict` gave as a table of names and values."""
    num_skipped = sum(entry["count"] for entry in scan["skipped"].values())
    rounded = scan["dtypes"].get("float32", 0)
    table = [
        (
            "read",
            f"{count(scan['num_seen'], 'sample')}: {scan['num_kept']:,} usable "
            f"({scan['num_cached']:,} in the cache already), {num_skipped:,} skipped",
        ),
        *(
            (f"  {reason}", f"{entry['count']:,}, first: {entry['examples'][0]}")
            for reason, entry in scan["skipped"].items()
        ),
        (
            "tokens",
            f"{scan['num_tokens']:,} ({scan['num_supervised_tokens']:,} supervised), "
            f"{count(scan['num_padding'], 'position')} of padding left out",
        ),
    ]
    if rounded:
        table.append(("rounded", f"float32 to bfloat16 in {count(rounded, 'sample')}"))
    return table
