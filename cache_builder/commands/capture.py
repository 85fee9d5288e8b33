"""Commands that run the target to fill a cache."""

from pathlib import Path
from typing import get_args

import click

from cache_builder.config import MAX_WORKERS, BuildConfig, Launcher
from shared import cli, config, log
from shared.quantity import count

_workers_option = click.option(
    "--workers",
    type=click.IntRange(min=1, max=MAX_WORKERS),
    help="Processes, each with the target in its memory. Default: workers.num_workers; unset, one "
    "per GPU, or without a GPU as many as cores (by workers.threads) and memory hold. Any number "
    "gives the same cache.",
)
_launcher_option = click.option(
    "--launcher",
    type=click.Choice(get_args(Launcher)),
    help="Where workers run: processes of this machine, or actors on the nodes of a Ray cluster "
    "that is running. Default: workers.launcher; unset, local.",
)


def _json_log(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        log.configure(as_json=True)


_json_log_option = click.option(
    "--json-log",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_json_log,
    help="Log one JSON object a line to stderr, for programs, instead of lines and bars.",
)


@click.command()
@cli.config_options
@_workers_option
@_launcher_option
@_json_log_option
@click.option(
    "--retry-quarantined",
    is_flag=True,
    help="Capture again the samples whose states could not be used before.",
)
def build(
    path: Path,
    overrides: tuple[str, ...],
    workers: int | None,
    launcher: Launcher | None,
    retry_quarantined: bool,
) -> None:
    """Build a cache; or resume it, or add what is new in the data.

    Stopped at any moment, the same command goes on from the shards that are committed. Building
    again with more data captures only the samples that are new.
    """
    from cache_builder.build import build as build_cache
    from cache_builder.inspect import inspect_cache, rows

    settings = _load(path, overrides, workers, launcher)
    build_cache(settings, retry_quarantined=retry_quarantined)
    cli.print_table(rows(inspect_cache(settings.cache.path)))


@click.command()
@cli.config_options
@cli.json_option
@_json_log_option
def estimate(path: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """What a build will cost: bytes per token, total, free space, hours.

    Measured on a sample of the data, which is captured and thrown away. Exit code 1 if the
    cache does not fit on its disk.
    """
    from cache_builder.estimate import estimate as estimate_build
    from cache_builder.estimate import rows
    from cache_builder.space import require_fit
    from cache_builder.workspace import workspace

    settings = config.load(BuildConfig, path, overrides)
    facts = estimate_build(settings)
    if as_json:
        cli.print_json(facts)
    else:
        cli.print_table(rows(facts))
    require_fit(workspace(settings.cache.path), facts["bytes_here"], settings.cache.min_free_bytes)


@click.command()
@cli.config_options
@click.option(
    "--drop-lost",
    is_flag=True,
    help="Let go of damaged shards that no plan on disk has, or that were imported; build, or "
    "import, again afterwards.",
)
@_workers_option
@_launcher_option
@_json_log_option
def repair(
    path: Path,
    overrides: tuple[str, ...],
    drop_lost: bool,
    workers: int | None,
    launcher: Launcher | None,
) -> None:
    """Make a damaged cache whole, and change nothing else.

    Index and manifest are made again from what is in the cache, cache.json, head and calibration
    from the target, if they come out as they were. Damaged and missing shards are captured anew,
    with the batches and threads they were captured with.
    """
    from cache_builder.repair import repair as repair_cache

    repaired = repair_cache(_load(path, overrides, workers, launcher), drop_lost=drop_lost)
    click.echo(
        f"{count(len(repaired), 'shard')} captured anew" + "".join(f"\n  {i}" for i in repaired)
    )


def _load(
    path: Path, overrides: tuple[str, ...], workers: int | None, launcher: Launcher | None
) -> BuildConfig:
    given = [f"workers.num_workers={workers}"] * (workers is not None)
    given += [f"workers.launcher={launcher}"] * (launcher is not None)
    return config.load(BuildConfig, path, (*overrides, *given))
