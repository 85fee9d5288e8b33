"""The command line of stage two."""

import logging
from pathlib import Path
from typing import Any

import click

from shared import cli, config, log
from shared.errors import RunError
from trainer.commands.evaluate import checkpoint_option, evaluate
from trainer.config import TrainConfig
from trainer.ranges import COUNT
from trainer.run import Run
from trainer.sweep.config import MAX_JOBS

_FORMATS = ("dflash", "speculators")
_run = click.argument("run", type=click.Path(path_type=Path))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Train a DFlash drafter from a cache of hidden states, without the target.

    \b
    A run, from its cache to a directory that inference engines load:
      trainer train --config run.toml
      trainer export RUN
      trainer summary RUN
      trainer evaluate RUN --target DIR --prompts FILE
      trainer doctor RUN
      trainer projection RUN -o projection.safetensors
      trainer sweep --config run.toml --space sweep.toml -o SWEEP
    """


@main.command("train")
@cli.config_options
@click.option(
    "--resume/--fresh",
    default=True,
    help="Go on from the newest checkpoint (default), or delete what the run has and begin anew.",
)
def train_command(path: Path, overrides: tuple[str, ...], resume: bool) -> None:
    """Train until `train.steps`, evaluating and saving on the way.

    Ctrl-C and SIGTERM finish the step, save it and exit with 130 or 143; a second one quits at
    once. Stopped at any moment, the same command goes on from the newest checkpoint and reaches
    the same weights.
    """
    from trainer.ranks import join
    from trainer.train import train

    settings = config.load(TrainConfig, path, overrides)
    with join(settings.train.device) as ranks:
        if ranks.size > 1:
            level = logging.INFO if ranks.is_main else logging.WARNING
            log.configure(level, worker=f"rank {ranks.rank}")
        stopped_by = train(settings, ranks, is_fresh=not resume)
    if stopped_by is not None:
        raise click.exceptions.Exit(128 + stopped_by)


@main.command("sweep")
@cli.config_options
@click.option(
    "--space",
    type=click.Path(path_type=Path),
    required=True,
    help="TOML file whose section [sweep] says what to vary and what to look for.",
)
@click.option("--trials", type=click.IntRange(min=1, max=COUNT), help="Instead of the file's.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1, max=MAX_JOBS),
    help="Trials at a time; instead of the file's.",
)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, help="Directory of the sweep."
)
def sweep_command(
    path: Path,
    overrides: tuple[str, ...],
    space: Path,
    trials: int | None,
    jobs: int | None,
    out: Path,
) -> None:
    """Search settings by many runs on one cache; a table and OUT/sweep.html at the end.

    Each trial is a `trainer train` of its own. Ctrl-C and SIGTERM have them finish their steps
    and save; stopped or killed at any moment, the same command goes on. Exit code 1 if all
    trials failed.
    """
    try:
        from trainer.sweep.command import run_sweep
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("optuna", "plotly"):
            raise
        raise RunError(
            f"a sweep needs {error.name}, which is not installed. Install it: "
            "pip install 'draftcache[sweep]'."
        ) from None

    stopped_by = run_sweep(out, space, path, overrides, trials=trials, jobs=jobs, say=click.echo)
    if stopped_by is not None:
        raise click.exceptions.Exit(128 + stopped_by)


main.add_command(evaluate)


@main.command()
@_run
@click.option(
    "--format",
    "form",
    type=click.Choice(_FORMATS),
    default=_FORMATS[0],
    show_default=True,
    help="dflash: z-lab's layout, for dflash, SGLang and vLLM. speculators: for it and vLLM.",
)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Default: RUN/export/FORMAT.")
@checkpoint_option
@click.option("--target", help="Hub id of the target, for consumers; default: what the cache says.")
@click.option(
    "--draft-vocab",
    type=click.IntRange(min=1),
    metavar="N",
    help="Draft only the N tokens most frequent in the training data (speculators).",
)
def export(
    run: Path,
    form: str,
    out: Path | None,
    checkpoint: str,
    target: str | None,
    draft_vocab: int | None,
) -> None:
    """Write a checkpoint as a drafter directory that others load, and check it."""
    from trainer.export import export_dflash, export_speculators

    out = out or run / "export" / form
    if form == "speculators":
        path = export_speculators(
            Run(run), out, target=target, checkpoint=checkpoint, draft_vocab_size=draft_vocab
        )
        click.echo(path)
        return
    if draft_vocab is not None:
        raise click.UsageError("--draft-vocab: only --format speculators has a reduced vocabulary.")
    click.echo(export_dflash(Run(run), out, target=target, checkpoint=checkpoint))


@main.command("projection")
@_run
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="File to write.")
@click.option(
    "--rank", type=click.IntRange(min=1), help="Values of a projected token; or --rank-factor."
)
@click.option(
    "--rank-factor",
    type=cli.FiniteFloat(min=1.0),
    help="Rank over the target's hidden size; default 1. Above it: leading principal directions.",
)
@click.option(
    "--orthonormal/--no-orthonormal",
    "is_orthonormal",
    default=True,
    help="Make the rows orthogonal, of one length (default), or leave those of the fc as they are.",
)
@click.option(
    "--principal",
    "is_principal",
    is_flag=True,
    help="Principal directions of the states in RUN's cache instead of its fc, to compare with.",
)
@click.option(
    "--tokens",
    "num_tokens",
    type=click.IntRange(min=2),
    help="Tokens of the pilot's cache that RMS and covariance are taken of; default 65,536.",
)
def projection_command(
    run: Path, out: Path, is_orthonormal: bool, is_principal: bool, **given: Any
) -> None:
    """Write what a cache of the same target may be projected with: the row space of RUN's fc.

    RUN is a pilot, trained on a small cache of the states themselves. `cache-builder build` with
    `capture.projection` set to the file then stores as many values of a token as its rank.
    """
    from shared.files import write_bytes, writing
    from trainer.projection import ProjectionSettings, make_projection, rows

    if given["rank"] is not None and given["rank_factor"] is not None:
        raise click.UsageError("--rank and --rank-factor say the same: give one of them.")
    if is_principal and not is_orthonormal:
        raise click.UsageError("--no-orthonormal: the rows of --principal are orthogonal.")
    settings = ProjectionSettings(
        is_orthonormal=is_orthonormal,
        is_principal=is_principal,
        **{name: value for name, value in given.items() if value is not None},
    )
    projection = make_projection(Run(run), settings)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, projection.to_bytes())
    cli.print_table([*rows(projection), ("written", str(out))])


@main.command()
@_run
@cli.json_option
def summary(run: Path, as_json: bool) -> None:
    """What a run was made of and what came out, in one short table."""
    from trainer.summary import rows, summarize

    exports = [run / "export" / form for form in _FORMATS]
    facts = summarize(Run(run), next((path for path in exports if path.is_dir()), exports[0]))
    if as_json:
        cli.print_json(facts)
    else:
        cli.print_table(rows(facts))


@main.command()
@_run
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write a page with plots, the findings marked; it needs no network.",
)
@cli.json_option
def doctor(run: Path, html: Path | None, as_json: bool) -> None:
    """Name the faults of a run: steps, evidence, what to do. Exit code 1 if there is one.

    May look at a run in progress. Every checkpoint is read whole.
    """
    from trainer.doctor.diagnosis import describe_run, diagnose, lines
    from trainer.doctor.page import write_page
    from trainer.doctor.view import RunView

    view = RunView.read(Run(run))
    diagnosis = diagnose(view)
    if html is not None:
        write_page(html, view, diagnosis)
    if as_json:
        cli.print_json(describe_run(view) | diagnosis.to_dict())
    else:
        for line in lines(view, diagnosis):
            click.echo(line)
    if not diagnosis.is_healthy:
        raise click.exceptions.Exit(1)


@main.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@cli.json_option
def inspect(checkpoint: Path, as_json: bool) -> None:
    """Tensors, settings and position of a checkpoint directory, or of the newest one of a run."""
    from trainer.inspect import inspect_checkpoint, rows, tensor_lines

    facts = inspect_checkpoint(checkpoint)
    if as_json:
        cli.print_json(facts)
        return
    cli.print_table(rows(facts))
    click.echo()
    for line in tensor_lines(facts):
        click.echo(line)


@main.command()
@click.argument("runs", type=click.Path(path_type=Path), nargs=-1, required=True)
@cli.json_option
def compare(runs: tuple[Path, ...], as_json: bool) -> None:
    """Held-out figures of several runs side by side, and the settings in which they differ.

    Exit code 1 if they were not measured on the same held-out samples.
    """
    from trainer.compare import compare as compare_runs
    from trainer.compare import lines

    result = compare_runs([Run(path) for path in runs])
    if as_json:
        cli.print_json(result)
    else:
        for line in lines(result):
            click.echo(line)
    if not result["comparable"]:
        raise click.exceptions.Exit(1)
