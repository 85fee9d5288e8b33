"""`trainer evaluate`: from a cache, or with the target."""

import json
from pathlib import Path
from typing import Any

import click

from shared import cli
from shared.location import Location
from trainer.ranges import COUNT
from trainer.run import BEST, NEWEST, Run

_WHEN_FULL = (
    "Nothing of it grows with the samples asked for: free the GPU of other processes, or show "
    "another one by CUDA_VISIBLE_DEVICES."
)
_WHEN_FULL_OF_TARGET = (
    "Lower --max-new-tokens or --tree-budget, leave out the longest prompts, free the GPU of other "
    "processes, or take another by --device."
)

checkpoint_option = click.option(
    "--checkpoint",
    metavar="STEP",
    default=NEWEST,
    show_default=True,
    help=f"Of a run: a step whose checkpoint is kept, {NEWEST}, or {BEST}: of the highest "
    "held-out tau_walk.",
)


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--cache", type=cli.LocationType(), help="Another cache of the same settings.")
@click.option(
    "--samples",
    type=click.IntRange(min=1, max=COUNT),
    help="Held-out samples; default as configured.",
)
@click.option(
    "--target", type=click.Path(path_type=Path), help="Decode with this target: see above."
)
@click.option(
    "--prompts",
    "files",
    type=click.Path(path_type=Path),
    multiple=True,
    help="JSONL file with messages, prompt, question or input_ids. May be given many times.",
)
@click.option(
    "--prompt-set",
    "sets",
    type=click.Choice(["mt-bench", "humaneval", "gsm8k"]),
    multiple=True,
    help="Prompts of a benchmark, from a package: an error says which.",
)
@checkpoint_option
@click.option("--limit", type=click.IntRange(min=1), help="Prompts at most.")
@click.option(
    "--template-arg",
    "template_args",
    metavar="NAME=VALUE",
    multiple=True,
    help="Argument of the chat template: enable_thinking=false. Default: those of a run's cache.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=2),
    default=128,
    show_default=True,
    help="Of a text.",
)
@click.option(
    "--tree-budget",
    "budgets",
    metavar="N[,N...]",
    multiple=True,
    help="Also decode by trees of N drafted tokens (DDTree), as 16,64. Greedy only.",
)
@click.option(
    "--temperature",
    type=cli.FiniteFloat(min=0.0),
    default=0.0,
    show_default=True,
    help="Above 0, texts are drawn from the target's distribution; 0 is greedy.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="For a temperature over 0.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="bfloat16",
    show_default=True,
    help="Of target and drafter. In float32 plain decoding has hardly a tie.",
)
@click.option("--device", default="auto", show_default=True, help="As torch names it.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write an HTML page with plots; it needs no network.",
)
@cli.json_option
@click.pass_context
def evaluate(
    context: click.Context,
    /,
    run: Path,
    cache: Location | None,
    samples: int | None,
    target: Path | None,
    as_json: bool,
    checkpoint: str,
    **options: Any,
) -> None:
    """How many drafted tokens the target accepts: by a cache, or by decoding with the target.

    Without --target: held-out loss and acceptance length of a checkpoint, from a cache.

    With --target DIR, RUN may also be an exported drafter. Every prompt is decoded by the target
    alone, by speculative decoding in chains, and by trees of each --tree-budget. Greedy texts are
    compared token for token with plain decoding: exit code 1 if one differs by more than a tie.

    \b
      trainer evaluate RUN
      trainer evaluate RUN --target DIR --prompts held-out.jsonl --limit 20 --tree-budget 16,64
      trainer evaluate RUN/export/dflash --target DIR --prompt-set gsm8k --plot page.html

    \b
    tau             tokens of a round, one forward of the target: accepted drafts and its own token
    tokens/forward  the same with the prefills, which give one token each
    speed-up        against plain decoding of the same prompts in this run, prefills left out
    """
    given = [
        name
        for name in cli.given_options(context)
        if name not in ("--json", "--target", "--checkpoint")
    ]
    of_cache = {"--cache", "--samples"}
    if wrong := [name for name in given if (name in of_cache) == (target is not None)]:
        if target is None:
            raise click.UsageError(f"{wrong[0]} goes with --target, the directory of the target.")
        raise click.UsageError(f"{wrong[0]} is of the evaluation from a cache, without --target.")
    if "--seed" in given and not options["temperature"]:
        raise click.UsageError("--seed goes with --temperature: at 0 nothing is drawn.")
    if target is not None:
        _decode(run, target, as_json, checkpoint=checkpoint, **options)
        return
    from trainer.evaluate import evaluate_run
    from trainer.footprint import memory_errors
    from trainer.summary import evaluation_rows

    with memory_errors(str(run), _WHEN_FULL):
        result = evaluate_run(Run(run), cache=cache, max_samples=samples, checkpoint=checkpoint)
    if as_json:
        cli.print_json(result)
        return
    cli.print_table(evaluation_rows(result))


def _decode(
    run: Path,
    target: Path,
    as_json: bool,
    *,
    checkpoint: str,
    files: tuple[Path, ...],
    sets: tuple[str, ...],
    limit: int | None,
    template_args: tuple[str, ...],
    max_new_tokens: int,
    budgets: tuple[str, ...],
    temperature: float,
    seed: int,
    dtype: str,
    device: str,
    plot: Path | None,
) -> None:
    """Evaluate with the target. Its libraries are loaded here and nowhere else."""
    if not files and not sets:
        raise click.UsageError("--target needs prompts: give --prompts FILE or --prompt-set NAME.")
    from trainer.decoding.command import evaluate_with_target
    from trainer.decoding.evaluation import DecodingConfig
    from trainer.decoding.report import notes, table, table_lines, write_plots
    from trainer.footprint import memory_errors
    from trainer.page import import_plotly

    if plot is not None:
        import_plotly()  # that it is missing must not be found out at the end
    with memory_errors(str(run), _WHEN_FULL_OF_TARGET):
        result = evaluate_with_target(
            run,
            target,
            files=files,
            sets=sets,
            limit=limit,
            template_arguments=dict(map(_template_argument, template_args)),
            config=DecodingConfig(
                max_new_tokens=max_new_tokens,
                tree_budgets=_budgets(budgets),
                temperature=temperature,
                seed=seed,
            ),
            dtype=dtype,
            device=device,
            checkpoint=checkpoint,
        )
    if as_json:
        cli.print_json(result)
    else:
        for line in [*table_lines(table(result)), "", *notes(result)]:
            click.echo(line)
    if plot is not None:
        write_plots(plot, result)
    if result["lossless"] is False:
        raise click.exceptions.Exit(1)


def _budgets(given: tuple[str, ...]) -> tuple[int, ...]:
    words = [word.strip() for text in given for word in text.split(",")]
    if wrong := [word for word in words if not word.isdecimal() or not int(word)]:
        raise click.UsageError(f"--tree-budget {wrong[0]!r}: expected numbers from 1, as 16,64.")
    return tuple(sorted(set(map(int, words))))


def _template_argument(given: str) -> tuple[str, Any]:
    name, equals, value = given.partition("=")
    if not name or not equals:
        raise click.UsageError(f"--template-arg {given!r}: expected NAME=VALUE.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
