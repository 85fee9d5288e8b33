"""What a check says."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

_FEW_RANGES = 6


class NotCheckedError(Exception):
    """The run does not hold what the check needs; the message says what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    severity: Severity
    """`error`: the run is damaged, or does something else than configured. `warning`: a fault
    that costs quality or time. `note`: a choice worth knowing, no fault."""

    name: str
    evidence: str
    advice: str
    steps: tuple[tuple[int, int], ...] = ()
    """Ranges of steps, both ends included; empty where it is about the whole run."""

    metric: str = ""
    """The one metric that it is about, as in metrics.jsonl; empty where it is about all."""

    @property
    def is_fault(self) -> bool:
        return self.severity != "note"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self) | {"steps": [list(pair) for pair in self.steps]}


def ranges(steps: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Ascending `steps` as ranges of neighbours."""
    found: list[tuple[int, int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
    return tuple(found)


def format_steps(steps: Sequence[tuple[int, int]]) -> str:
    """`steps` for people, the first few ranges of them."""
    if not steps:
        return "whole run"
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in steps[:_FEW_RANGES]]
    more = f" and {len(steps) - _FEW_RANGES} more" if len(steps) > _FEW_RANGES else ""
    word = "step" if len(steps) == 1 and steps[0][0] == steps[0][1] else "steps"
    return f"{word} {', '.join(shown)}{more}"
