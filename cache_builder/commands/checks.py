"""Commands that look at a cache."""

from pathlib import Path

import click

from shared import cli
from shared.bar import Bar
from shared.errors import CacheError
from shared.location import Location
from shared.quantity import count


@click.command()
@click.argument("cache", type=cli.LocationType())
@cli.json_option
def inspect(cache: Location, as_json: bool) -> None:
    """What is in a cache: fingerprint, counts, bytes, lengths, layers."""
    from cache_builder.inspect import inspect_cache, rows

    facts = inspect_cache(cache)
    if as_json:
        cli.print_json(facts)
    else:
        cli.print_table(rows(facts))


@click.command()
@click.argument("cache", type=cli.LocationType())
@click.option("--deep", is_flag=True, help="Read every byte and check that states are finite.")
@click.option(
    "--recapture",
    "num_samples",
    type=click.IntRange(min=1),
    metavar="K",
    help="Run K random samples through the target again and compare. Needs --target.",
)
@click.option(
    "--target", type=click.Path(path_type=Path), help="Directory of the target, for --recapture."
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Chooses the K samples.",
)
@cli.json_option
@click.pass_context
def verify(
    context: click.Context,
    cache: Location,
    deep: bool,
    num_samples: int | None,
    target: Path | None,
    seed: int,
    as_json: bool,
) -> None:
    """Check a cache; exit code 1 if anything is wrong.

    Without --deep: metadata, small files, and the presence and size of the large ones. With
    --recapture K: what is stored of K samples is also what the target gives for them, and no
    neighbouring block is nearer.
    """
    from cache_builder.commit import uncommitted_groups
    from cache_builder.recapture import recapture, rows
    from cache_builder.verify import verify_cache

    if (num_samples is None) != (target is None):
        raise click.UsageError("--recapture K and --target DIR go together")
    if num_samples is None and "--seed" in cli.given_options(context):
        raise click.UsageError("--seed goes with --recapture: without it no sample is drawn")
    with Bar("verify", "shard") as bar:
        problems = verify_cache(cache, deep=deep, progress=bar.reach)
    report = None
    is_open = not any(problem.piece in ("description", "manifest", "index") for problem in problems)
    if num_samples is not None and target is not None and is_open:
        report = recapture(cache, target, num_samples, seed=seed)
        problems += report.problems
    uncommitted = uncommitted_groups(cache) if is_open else []
    if as_json:
        facts = {
            "ok": not problems,
            "problems": [p.to_dict() for p in problems],
            "uncommitted": uncommitted,
        }
        cli.print_json(facts | ({"recapture": report.to_dict()} if report else {}))
    elif report:
        cli.print_table(rows(report))
    if uncommitted:
        click.echo(
            f"{cache}: {count(len(uncommitted), 'shard')} never committed "
            f"({', '.join(uncommitted[:8])}): of a builder at work, or the next build removes them",
            err=True,
        )
    if problems and problems[0].piece == "description":
        raise CacheError(problems[0].message)
    for problem in problems[:8]:
        click.echo(problem.message, err=True)
    if problems and all(problem.kind == "differs" for problem in problems):
        raise CacheError(
            f"{cache}: {count(len(problems), 'problem')}: what is stored is whole, but the target "
            "gives other states here. Compare devices and versions of torch and transformers with "
            "those of the build; if they are the same, build the cache anew."
        )
    if problems:
        raise CacheError(
            f"{cache}: {count(len(problems), 'problem')}. Run `cache-builder repair` with its "
            "configuration."
        )
    if not as_json:
        click.echo(f"{cache}: nothing is wrong")
