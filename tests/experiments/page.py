"""Tables of the results, and the page that shows them: trainer/PROOF.md.

The page is written by hand but for what lies between markers, which `publish` writes.
"""

import re
from pathlib import Path

from shared.files import write_bytes
from tests.conftest import REPOSITORY
from tests.experiments.figures import METRICS, Difference, Record, difference, largest_gap, value
from tests.experiments.plot import dot_plot
from tests.experiments.runner import Results, lines_of
from tests.experiments.variant import Group
from tests.experiments.variants import BASELINE, FLOOR, GROUPS, VARIANTS

PAGE = REPOSITORY / "trainer" / "PROOF.md"
PLOTS = "proof"
"""Directory of the plots, beside the page."""


def rows_of(group: Group, results: Results) -> dict[str, dict[int, Record]]:
    """Runs by seed under the titles of their rows, the baseline first; none without it."""
    rows: dict[str, dict[int, Record]] = {}
    for name in (group.baseline, *group.variants):
        variant, by_seed = VARIANTS[name], results.of(name)
        if not by_seed:
            if name == group.baseline:
                break
            continue
        rows[variant.title] = by_seed
        if variant.also:
            also = {seed: {**record, **record["also"]} for seed, record in by_seed.items()}
            rows[f"{variant.title}, asked on {variant.also}"] = also
    if len(rows) > 1:  # of the baseline the seeds that something is compared with
        title, *others = rows
        asked = set().union(*(rows[other] for other in others))
        rows[title] = {seed: record for seed, record in rows[title].items() if seed in asked}
    return rows


def text_of(group: Group, results: Results) -> str:
    """The tables of a group in Markdown; what is not run yet is left out."""
    runs = rows_of(group, results)
    if len(runs) < 2:
        return f"{group.name}: not run yet."
    if group.name == "live":
        return _live_table(runs)
    metrics = [m for m in METRICS if m != "loss" or group.has_one_loss]
    baseline, *_ = runs.values()
    rows = []
    for title, by_seed in runs.items():
        cells = [f"{_mean([value(r, m) for r in by_seed.values()]):.4f}" for m in metrics]
        rows.append([title, str(len(by_seed)), *cells, *_more(group, by_seed)])
        if by_seed is not baseline:
            found = [difference(by_seed, baseline, metric) for metric in metrics]
            rows.append(["less the baseline", "", *map(_difference, found)])
    heads = ["", "seeds", *(_head(metric) for metric in metrics)]
    if group.name == "order":
        heads.append("wobble of the training loss")
    if group.has_bytes:
        heads.append("bytes of a token, share of bf16")
    each = [
        [title, str(seed), *(f"{value(record, m):.4f}" for m in metrics)]
        for title, by_seed in runs.items()
        for seed, record in sorted(by_seed.items())
    ]
    return "\n".join(
        [
            _table(heads, rows),
            "",
            "<details><summary>Every run</summary>",
            "",
            _table(["", "seed", *(_head(metric) for metric in metrics)], each),
            "",
            "</details>",
        ]
    )


def plot_of(group: Group, results: Results) -> str | None:
    """The plot of a group as SVG; None where there is nothing to see."""
    runs = rows_of(group, results)
    if group.name == "live" or len(runs) < 2:
        return None
    metrics = [m for m in ("loss", "chain", "walk") if m != "loss" or group.has_one_loss]
    values = {
        _head(metric): [
            {seed: value(record, metric) for seed, record in by_seed.items()}
            for by_seed in runs.values()
        ]
        for metric in metrics
    }
    floor = results.of(FLOOR).values() if group.baseline == BASELINE else []
    marks = {_head(m): _mean([value(record, m) for record in floor]) for m in metrics if floor}
    return dot_plot(list(runs), values, marks)


def publish(results: Results, copy: Path, page: Path = PAGE) -> None:
    """Write tables and plots of all groups into `page`, and the results they are made of to `copy`.

    Runs that are no variant any more are left out.

    Raises:
        ValueError: the page has no place for a group.
    """
    text = page.read_text()
    (page.parent / PLOTS).mkdir(exist_ok=True)
    for name, group in GROUPS.items():
        block = text_of(group, results)
        if (svg := plot_of(group, results)) is not None:
            write_bytes(page.parent / PLOTS / f"{name}.svg", svg.encode())
            block = f"![{name}]({PLOTS}/{name}.svg)\n\n{block}"
        text, count = re.subn(
            rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)",
            lambda found, block=block: f"{found[1]}\n{block}\n\n{found[2]}",  # type: ignore[misc]
            text,
            flags=re.DOTALL,
        )
        if count != 1:
            raise ValueError(f"{page}: {count} places for {name!r}, expected one")
    write_bytes(page, text.encode())
    known = [record for name in VARIANTS for record in results.of(name).values()]
    write_bytes(copy, lines_of(known))


def _live_table(runs: dict[str, dict[int, Record]]) -> str:
    (_, baseline), *others = runs.items()
    rows = []
    for title, by_seed in others:
        for seed in sorted(by_seed.keys() & baseline.keys()):
            gaps = [f"{gap:g}" for gap in largest_gap(by_seed[seed], baseline[seed]).values()]
            rows.append([title, str(len(by_seed[seed]["losses"])), *gaps])
    return _table(
        [
            "largest difference from the cache",
            "steps",
            "training loss of a step",
            "gradient norm of a step",
            "held-out metrics",
        ],
        rows,
    )


def _more(group: Group, by_seed: dict[int, Record]) -> list[str]:
    """What a row says besides the metrics."""
    if group.name == "order":
        return [f"{_mean([record['train']['wobble'] for record in by_seed.values()]):.3f}"]
    if group.has_bytes:
        stored = next(iter(by_seed.values()))["cache"]
        return [f"{stored['bytes_per_token']:,.0f}, {stored['stored_over_raw']:.3f}"]
    return []


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _difference(found: Difference | None) -> str:
    if found is None:
        return ""
    text = f"{found.mean:+.4f} ± {found.error:.4f}"
    return f"**{text}**" if found.is_sure else text


def _head(metric: str) -> str:
    return "held-out loss" if metric == "loss" else f"tau {metric}"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    width = len(heads)
    lines = [heads, ["---"] * width, *(row + [""] * (width - len(row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
