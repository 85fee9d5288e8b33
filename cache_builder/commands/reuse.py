"""Commands that move what is captured already."""

from pathlib import Path
from typing import Any

import click

from cache_builder.config import BuildConfig, CacheConfig
from cache_builder.importing.config import CheckConfig
from shared import cli, config
from shared.location import Location

_CHECK = CheckConfig()

_scratch_option = click.option(
    "--scratch",
    type=click.Path(path_type=Path),
    help="For a cache in a bucket: cache.scratch of a build, with its default.",
)


@click.command()
@cli.config_options
@click.option("--dry-run", is_flag=True, help="Say what would go, and change nothing.")
@click.option(
    "--ignore-bad-rows",
    is_flag=True,
    help="Go on where rows of the data cannot be used; by default nothing is removed then.",
)
def prune(path: Path, overrides: tuple[str, ...], dry_run: bool, ignore_bad_rows: bool) -> None:
    """Remove the samples that are no longer in the data.

    Nothing is captured anew. Runs that started from an earlier generation cannot go on if a shard
    that it has went.
    """
    from cache_builder.prune import prune as prune_cache
    from cache_builder.prune import rows

    settings = config.load(BuildConfig, path, overrides)
    report = prune_cache(settings, dry_run=dry_run, ignore_bad_rows=ignore_bad_rows)
    cli.print_table(rows(report, dry_run=dry_run))


@click.command()
@click.argument("into", type=cli.LocationType())
@click.argument("sources", type=cli.LocationType(), nargs=-1, required=True, metavar="FROM...")
@_scratch_option
def merge(into: Location, sources: tuple[Location, ...], scratch: Path | None) -> None:
    """Add to the cache INTO the samples of the caches FROM that it does not have.

    All must be of one fingerprint: the same target, taps, codec and tokens.
    """
    from cache_builder.merge import merge as merge_caches
    from cache_builder.merge import rows

    given = {"path": str(into)} | ({"scratch": str(scratch)} if scratch is not None else {})
    place = config.build(CacheConfig, given).path
    cli.print_table(rows(merge_caches(place, sources)))


@click.command("import")
@click.argument("kind", type=click.Choice(["speculators", "specforge"]))
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("cache", type=cli.LocationType())
@click.option(
    "--target", required=True, help="Directory (or hub name) of the model that was captured."
)
@click.option("--revision", help="Commit, branch or tag of a target of the hub.")
@click.option(
    "--layer-ids",
    metavar="K,K,...",
    help="Layer of each state per token, in the order stored, as the capture was told.",
)
@click.option(
    "--layer-numbering",
    type=click.Choice(["block", "hidden-states"]),
    help="What these ids count: see above.",
)
@click.option(
    "--last-hidden",
    type=click.Choice(["before-norm", "after-norm"]),
    help="Where the last block's output was taken, if an id names it.",
)
@click.option("--keep-last", is_flag=True, help="Keep the last block's output as one more layer.")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    help="Type the target computed in; default: that of the stored states.",
)
@click.option(
    "--codec",
    metavar="PRESET",
    help="lossless, balanced or small: codec.preset of a build, with its default.",
)
@click.option(
    "--states",
    type=click.Path(path_type=Path),
    help="speculators: directory of the hs_*.safetensors, if not SOURCE/hidden_states.",
)
@click.option("--tag", help="Source tag of the samples; default: KIND.")
@click.option(
    "--same-as",
    type=cli.LocationType(),
    metavar="CACHE",
    help="Declare kernel, template and lengths to be those of this cache: the two can be merged.",
)
@click.option(
    "--skip-mismatched",
    is_flag=True,
    help="Count samples whose states and tokens do not fit; by default the first one stops.",
)
@click.option(
    "--recapture",
    "num_samples",
    type=click.IntRange(min=1),
    metavar="K",
    help=f"Random samples that the target is run on, to compare; default: {_CHECK.num_samples}.",
)
@click.option("--no-recapture", is_flag=True, help="Compare nothing: believe the declarations.")
@click.option(
    "--tolerance",
    type=cli.FiniteFloat(min=0.0),
    help=f"Relative difference that is allowed; default: {_CHECK.tolerance:g}.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    help=f"Chooses the K samples; default: {_CHECK.seed}.",
)
@click.option(
    "--max-quarantined-fraction",
    type=cli.FiniteFloat(min=0.0),
    help="Share of samples with unusable states (not finite, constant) allowed; as in a build.",
)
@click.option(
    "--shard-mib",
    type=cli.FiniteFloat(min=0.0),
    help="Raw states of one shard, MiB; as in a build.",
)
@click.option(
    "--min-free-gb",
    type=cli.FiniteFloat(min=0.0),
    help="Disk space that stays free; as in a build.",
)
@_scratch_option
def import_command(kind: str, source: Path, cache: Location, **options: Any) -> None:
    """Import hidden states that another tool captured into CACHE.

    \b
    SOURCE by KIND:
      speculators  the data set of its preparation, with hidden_states/hs_N.safetensors
      specforge    the output of prepare_hidden_states: rows_*/data_N.ckpt or .ckpt.gz
                   (pickles; loaded as plain tensors only, never as code)

    Their files do not say which layers they hold, so you do. Look for the ids in --target-layer-ids
    of the vLLM launch (2, N//2 and N-3 of N blocks if it was not given, with N behind them), or in
    target_layer_ids under dflash_config of SpecForge's draft configuration.

    What they count: `--layer-numbering block`: id k is the output of decoder block k, from 0
    (z-lab, SGLang, SpecForge). `hidden-states`: id k is entry k of transformers' hidden_states,
    whose 0 is the embedding (speculators, vLLM). The last block's output is left out unless
    --keep-last; say where it was taken with --last-hidden.

    \b
    For a target of 36 blocks, captured with the defaults of either tool:
      cache-builder import speculators DIR CACHE --target MODEL \\
        --layer-ids 2,18,33,36 --layer-numbering hidden-states --last-hidden before-norm
      cache-builder import specforge DIR CACHE --target MODEL \\
        --layer-ids 1,9,17,25,33 --layer-numbering block

    Before anything is written, K samples go through the target again: a wrong layer, model or
    token stops the import, and the message says which layers the states are of. SOURCE is only
    read. Stopped at any moment, the same command goes on; run again later, it adds what is new.
    """
    from cache_builder.importing.config import read_options
    from cache_builder.importing.importer import import_states, rows

    cli.print_table(
        rows(import_states(read_options(kind=kind, source=source, cache=cache, **options)))
    )
