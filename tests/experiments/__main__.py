"""`python -m tests.experiments`: what cache and recipe cost or gain in the drafter's quality."""

from pathlib import Path

import click

from shared import cli
from tests.conftest import REPOSITORY
from tests.experiments.page import publish, text_of
from tests.experiments.runner import Results, Runner, jobs_of
from tests.experiments.variants import GROUPS, VARIANTS

DIRECTORY = REPOSITORY / ".demo" / "experiments"
PUBLISHED = Path(__file__).with_name("results.jsonl")


@click.command()
@click.option(
    "--only", "groups", multiple=True, type=click.Choice(list(GROUPS)), help="These groups alone."
)
@click.option("--variant", "names", multiple=True, type=click.Choice(list(VARIANTS)))
@click.option("--seeds", type=click.IntRange(min=1), help="The first so many alone.")
@click.option("--at-once", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--nice", type=click.IntRange(0, 19), default=5, show_default=True)
@click.option("--published", is_flag=True, help="Begin with the results of trainer/PROOF.md.")
@click.option("--publish", "is_public", is_flag=True, help="Refresh trainer/PROOF.md by all.")
@click.option("--no-run", is_flag=True, help="Tables of what is there.")
def main(
    groups: tuple[str, ...],
    names: tuple[str, ...],
    seeds: int | None,
    at_once: int,
    nice: int,
    published: bool,
    is_public: bool,
    no_run: bool,
) -> None:
    """Train every variant with every seed and compare them. Stopped, the same command goes on."""
    results = Results.read(DIRECTORY / "results.jsonl")
    if published:
        results.by_key = Results.read(PUBLISHED).by_key | results.by_key
    jobs = [
        job
        for job in jobs_of(groups or GROUPS)
        if (not names or job.variant.name in names) and (seeds is None or job.seed < seeds)
    ]
    failed = []
    if not no_run:
        runner = Runner(DIRECTORY, results, at_once=at_once, nice=nice, say=click.echo)
        runner.build([job for job in jobs if job.key not in results.by_key])
        failed = runner.run(jobs)
    for name in groups or GROUPS:
        click.echo(text_of(GROUPS[name], results))
    if is_public:
        publish(results, PUBLISHED)
    if failed:
        raise click.ClickException(f"{len(failed)} runs failed: {', '.join(map(str, failed))}.")


if __name__ == "__main__":
    cli.run(main)
