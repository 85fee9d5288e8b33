"""The figures of an evaluation with the target: a table for people, and a page of plots."""

from html import escape
from pathlib import Path
from typing import Any

from trainer.page import import_plotly, plot_html, table_html, write_page

_HEADER = ["method", "tau", "tokens/forward", "tokens/s", "speed-up"]
_LINES = 5
"""Differences that are shown."""


def table(result: dict[str, Any]) -> list[list[str]]:
    """A header and a row for each method; the last column has the acceptance of slots 1, 2, ..."""
    rows = [[*_HEADER, "accepted by slot"]]
    for method in result["methods"]:
        is_plain = method["method"] == "plain"
        shares = [] if is_plain else method["accepted_by_slot"]
        rows.append(
            [
                method["method"],
                _number(method["tau"], 3),
                _number(method["tokens_per_forward"], 3),
                _number(method["tokens_per_second"], 1),
                _number(method["speedup"], 2),
                " ".join(_number(share, 2).removeprefix("0") for share in shares),
            ]
        )
    return rows


def table_lines(rows: list[list[str]]) -> list[str]:
    """Columns as wide as their widest entry."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def notes(result: dict[str, Any]) -> list[str]:
    """What the table is of, and whether the texts were those of plain decoding."""
    prompts = result["prompts"]
    left_out = f" ({prompts['num_too_long']} too long, left out)" if prompts["num_too_long"] else ""
    step = f", step {result['step']:,}" if result["step"] is not None else ""
    lines = [
        f"{prompts['num_prompts']} prompts{left_out}, at most {result['max_new_tokens']} new "
        f"tokens each, {result['dtype']} on {result['device']}; drafter {result['drafter']}{step}"
    ]
    if result["lossless"] is None:
        lines.append(
            f"temperature {result['temperature']:g}: texts are drawn, so none is compared with "
            "another"
        )
        return lines
    compared, ties = result["num_compared"], result["num_ties"]
    equal = compared - ties - result["num_different"]
    verdict = "lossless" if result["lossless"] else "NOT LOSSLESS"
    lines.append(
        f"{verdict}: {equal} of {compared} texts equal plain greedy decoding token for token, "
        f"{ties} part from it over a tie (logits within {result['tie_margin']:g}), "
        f"{result['num_different']} differ"
    )
    wrong = [difference for difference in result["differences"] if not difference["is_tie"]]
    lines += [
        f"  {d['method']}, {d['prompt']}: new token {d['position']} is {d['found']}, plain "
        f"decoding gives {d['expected']} (margin {_number(d['margin'], 4)})"
        for d in wrong[:_LINES]
    ]
    if len(wrong) > _LINES:
        lines.append(f"  and {len(wrong) - _LINES} more: see --json")
    return lines


def write_plots(path: Path, result: dict[str, Any]) -> None:
    """A page with the table, the acceptance by slot, and tau and speed-up by budget.

    Raises:
        RunError: plotly is not installed.
        DraftCacheError: the path cannot be written.
    """
    go, make_subplots = import_plotly()
    drafted = [method for method in result["methods"] if method["method"] != "plain"]
    figure = make_subplots(
        rows=1,
        cols=2,
        subplot_titles=["rounds that accepted slots 1 to k", "tau and speed-up by tree budget"],
    )
    for method in drafted:
        shares = method["accepted_by_slot"]
        figure.add_trace(
            go.Scatter(
                x=list(range(1, len(shares) + 1)),
                y=shares,
                name=method["method"],
                mode="lines+markers",
            ),
            1,
            1,
        )
    budgets = ["chain" if m["budget"] is None else str(m["budget"]) for m in drafted]
    for name, key in (("tau", "tau"), ("speed-up", "speedup")):
        values = [method[key] for method in drafted]
        figure.add_trace(go.Scatter(x=budgets, y=values, name=name, mode="lines+markers"), 1, 2)
    figure.update_xaxes(title_text="slot k", dtick=1, row=1, col=1)
    figure.update_yaxes(rangemode="tozero", gridcolor="#eee")
    figure.update_xaxes(title_text="budget", type="category", row=1, col=2)
    figure.update_layout(height=460, plot_bgcolor="white")
    lines = "".join(f"<p>{escape(line)}</p>" for line in notes(result))
    body = lines + table_html(table(result)) + plot_html(figure)
    write_page(path, f"decoding: {result['drafter']}", body)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
