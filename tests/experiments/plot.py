"""A plot of dots as SVG: a row for each variant, a panel for each metric, a dot for each seed."""

from collections.abc import Mapping, Sequence
from html import escape

_LABEL, _PANEL, _GAP, _ROW, _HEAD, _FOOT = 230, 190, 28, 30, 34, 26
_SEED_COLOURS = ("#0b6bcb", "#d9480f", "#2b8a3e", "#862e9c", "#5c5f66")


def dot_plot(
    titles: Sequence[str],
    values: Mapping[str, Sequence[Mapping[int, float]]],
    marks: Mapping[str, float],
) -> str:
    """The plot.

    Args:
        titles: of the rows.
        values: for each metric, which gets a panel, and each row the values by seed.
        marks: by metric, where a dashed line is drawn for scale.
    """
    width = _LABEL + len(values) * (_PANEL + _GAP)
    height = _HEAD + len(titles) * _ROW + _FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for row, title in enumerate(titles):
        parts.append(_text(_LABEL - 12, _middle(row) + 4, title, anchor="end"))
    for number, (metric, rows) in enumerate(values.items()):
        left = _LABEL + number * (_PANEL + _GAP)
        parts += _panel(left, metric, rows, marks.get(metric))
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    left: float, metric: str, rows: Sequence[Mapping[int, float]], mark: float | None
) -> list[str]:
    every = [x for row in rows for x in row.values()] + ([] if mark is None else [mark])
    low, high = min(every), max(every)
    margin = 0.12 * (high - low) or 0.01
    low, high = low - margin, high + margin
    bottom = _HEAD + len(rows) * _ROW

    def x_of(value: float) -> float:
        return left + _PANEL * (value - low) / (high - low)

    parts = [
        _text(left + _PANEL / 2, 18, metric, anchor="middle", weight="bold"),
        f'<rect x="{left}" y="{_HEAD}" width="{_PANEL}" height="{bottom - _HEAD}" '
        'fill="none" stroke="#ced4da"/>',
        _text(left, bottom + 17, f"{low:.3f}", colour="#5c5f66"),
        _text(left + _PANEL, bottom + 17, f"{high:.3f}", anchor="end", colour="#5c5f66"),
    ]
    if mark is not None:
        parts.append(
            f'<line x1="{x_of(mark):.1f}" y1="{_HEAD}" x2="{x_of(mark):.1f}" y2="{bottom}" '
            'stroke="#868e96" stroke-dasharray="4 3"/>'
        )
    for number, row in enumerate(rows):
        y = _middle(number)
        parts.append(f'<line x1="{left}" y1="{y}" x2="{left + _PANEL}" y2="{y}" stroke="#e9ecef"/>')
        if not row:
            continue
        mean = x_of(sum(row.values()) / len(row))
        parts.append(
            f'<line x1="{mean:.1f}" y1="{y - 10}" x2="{mean:.1f}" y2="{y + 10}" '
            'stroke="#212529" stroke-width="2"/>'
        )
        for seed, value in sorted(row.items()):
            colour = _SEED_COLOURS[seed % len(_SEED_COLOURS)]
            parts.append(
                f'<circle cx="{x_of(value):.1f}" cy="{y}" r="4" fill="{colour}" '
                f'fill-opacity="0.75"><title>seed {seed}: {value:.4f}</title></circle>'
            )
    return parts


def _middle(row: int) -> float:
    return _HEAD + (row + 0.5) * _ROW


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    weight: str = "normal",
    colour: str = "#212529",
) -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" fill="{colour}">'
        f"{escape(text)}</text>"
    )
