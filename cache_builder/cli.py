"""The command line of stage one."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from cache_builder.config import MAX_WORKERS, BuildConfig
from cache_builder.importing.config import CheckConfig
from shared import cli, config
from shared.errors import CacheError, EndpointError
from shared.location import Location
from shared.quantity import count

_CHECK = CheckConfig()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Run a target model over a dataset and store its hidden states in a cache.

    \b
    The data as samples; a cache, from nothing or from where it stopped, and a look at it:
      cache-builder preview --config cache.toml
      cache-builder build --config cache.toml
      cache-builder inspect CACHE
      cache-builder verify CACHE --deep
    """


_workers_option = click.option(
    "--workers",
    type=click.IntRange(min=1, max=MAX_WORKERS),
    help="Processes, each with the target in its memory. Default: one per GPU; without a GPU, as "
    "many as cores (by workers.threads) and memory hold. Any number gives the same cache.",
)


@main.command()
@cli.config_options
@_workers_option
@click.option(
    "--retry-quarantined",
    is_flag=True,
    help="Capture again the samples whose states could not be used before.",
)
def build(
    path: Path, overrides: tuple[str, ...], workers: int | None, retry_quarantined: bool
) -> None:
    """Build a cache; or resume it, or add what is new in the data.

    Stopped at any moment, the same command goes on from the shards that are committed. Building
    again with more data captures only the samples that are new.
    """
    from cache_builder.build import build as build_cache
    from cache_builder.inspect import inspect_cache, rows

    settings = _load(path, overrides, workers)
    build_cache(settings, retry_quarantined=retry_quarantined)
    cli.print_table(rows(inspect_cache(settings.cache.path)))


def _load(path: Path, overrides: tuple[str, ...], workers: int | None) -> BuildConfig:
    settings = config.load(BuildConfig, path, overrides)
    if workers is None:
        return settings
    return replace(settings, workers=replace(settings.workers, num_workers=workers))


@main.command()
@cli.config_options
@click.option(
    "-n", "num_samples", type=click.IntRange(min=0), default=3, show_default=True, help="Samples."
)
@click.option(
    "--rows",
    "num_rows",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Rows read at least for the account of what is dropped.",
)
def preview(path: Path, overrides: tuple[str, ...], num_samples: int, num_rows: int) -> None:
    """Show some samples as a build would make them, and why rows are dropped.

    Supervised tokens are green, or in [[ ]] where there are no colours (no terminal, or NO_COLOR
    is set). The target is not loaded.
    """
    from cache_builder.preview import preview as preview_data

    is_colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    settings = config.load(BuildConfig, path, overrides)
    for line in preview_data(settings, num_samples, num_rows=num_rows, is_colored=is_colored):
        click.echo(line)


@main.command()
@cli.config_options
@cli.json_option
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


@main.command()
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


@main.command()
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
@click.option("--seed", type=int, default=0, show_default=True, help="Chooses the K samples.")
@cli.json_option
def verify(
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
    from tqdm import tqdm

    from cache_builder.commit import uncommitted_groups
    from cache_builder.recapture import recapture, rows
    from cache_builder.verify import verify_cache

    if (num_samples is None) != (target is None):
        raise click.UsageError("--recapture K and --target DIR go together")
    with tqdm(desc="verify", unit="shard", disable=None) as bar:
        problems = verify_cache(cache, deep=deep, progress=lambda done: bar.update(done - bar.n))
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
            f"{cache}: {len(problems)} problems: what is stored is whole, but the target gives "
            "other states here. Compare devices and versions of torch and transformers with those "
            "of the build; if they are the same, build the cache anew."
        )
    if problems:
        raise CacheError(
            f"{cache}: {len(problems)} problems. Run `cache-builder repair` with its configuration."
        )
    if not as_json:
        click.echo(f"{cache}: nothing is wrong")


@main.command()
@cli.config_options
@click.option(
    "--drop-lost",
    is_flag=True,
    help="Let go of damaged shards that no plan on disk has; build again afterwards.",
)
@_workers_option
def repair(path: Path, overrides: tuple[str, ...], drop_lost: bool, workers: int | None) -> None:
    """Make a damaged cache whole, and change nothing else.

    Index and manifest are made again from what is in the cache. Damaged and missing shards are
    captured anew, with the batches and threads they were captured with.
    """
    from cache_builder.repair import repair as repair_cache

    repaired = repair_cache(_load(path, overrides, workers), drop_lost=drop_lost)
    click.echo(f"{len(repaired)} shards captured anew" + "".join(f"\n  {i}" for i in repaired))


@main.command()
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


@main.command()
@click.argument("into", type=cli.LocationType())
@click.argument("sources", type=cli.LocationType(), nargs=-1, required=True, metavar="FROM...")
def merge(into: Location, sources: tuple[Location, ...]) -> None:
    """Add to the cache INTO the samples of the caches FROM that it does not have.

    All must be of one fingerprint: the same target, taps, codec and tokens.
    """
    from cache_builder.merge import merge as merge_caches
    from cache_builder.merge import rows

    cli.print_table(rows(merge_caches(into, sources)))


@main.command()
@cli.config_options
@click.argument("prompts", nargs=-1, required=True)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, help="JSON lines; added to."
)
@click.option(
    "--max-new-tokens", type=int, default=2048, show_default=True, help="Tokens of one answer."
)
@click.option(
    "--temperature", type=float, default=0.0, show_default=True, help="0: always the most likely."
)
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="For temperatures over 0.")
@click.option("--limit", type=click.IntRange(min=1), help="Prompts to answer at most.")
@click.option(
    "--omit-ids", is_flag=True, help="Leave ids out of rows whose text tokenizes to exactly them."
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Rows at once. Without --endpoint.",
)
@click.option(
    "--name",
    help="What to call the target in the rows; default: its directory's name. Without --endpoint.",
)
@click.option("--endpoint", metavar="URL", help="Ask this server, such as http://host:8000/v1.")
@click.option("--model", help="What the server calls the target. With --endpoint.")
@click.option(
    "--concurrency",
    type=click.IntRange(min=1, max=4096),
    default=32,
    show_default=True,
    help="Conversations at once. With --endpoint.",
)
@click.option(
    "--chat",
    "is_chat",
    is_flag=True,
    help="Ask for chat completions, rendered by the server's template. With --endpoint.",
)
@click.option(
    "--plain",
    "is_plain",
    is_flag=True,
    help="Send only parameters of OpenAI's own protocol, for servers that refuse others: no ids "
    "come back, and further sampling is the server's. With --endpoint.",
)
@click.option(
    "--timeout",
    type=float,
    default=600.0,
    show_default=True,
    help="Seconds for one answer. With --endpoint.",
)
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=6,
    show_default=True,
    help="Of a request that met a busy, failing, silent or absent server. With --endpoint.",
)
@click.pass_context
def regenerate(
    context: click.Context,
    path: Path,
    overrides: tuple[str, ...],
    prompts: tuple[str, ...],
    out: Path,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    limit: int | None,
    omit_ids: bool,
    batch_size: int,
    name: str | None,
    endpoint: str | None,
    model: str | None,
    concurrency: int,
    is_chat: bool,
    is_plain: bool,
    timeout: float,
    retries: int,
) -> None:
    """Let the target answer the PROMPTS: a drafter learns from its target's own text.

    PROMPTS are files, globs or directories of conversations, as for `data.sources`. Answers that
    are in them are left out and written anew, turn by turn. Target and template are those of the
    configuration. Stopped at any moment, the same command goes on.

    \b
      cache-builder regenerate --config cache.toml prompts.jsonl -o answers.jsonl
      cache-builder build --config cache.toml --set 'data.sources=["answers.jsonl"]'

    With --endpoint a server runs the target, which is faster by far. It gets token ids and gives
    token ids back (vLLM; SGLang since July 2026); from another one the text is kept alone. Its key
    is taken from OPENAI_API_KEY. What it does not answer is named, and left to the next run.

    \b
      vllm serve Qwen/Qwen3-8B
      cache-builder regenerate --config cache.toml --endpoint http://localhost:8000/v1 \\
          --model Qwen/Qwen3-8B --concurrency 256 'prompts/*.jsonl' -o answers.jsonl
    """
    from contextlib import ExitStack

    from cache_builder.batches import Batches
    from cache_builder.dispatch import Dispatcher
    from cache_builder.endpoint import Endpoint
    from cache_builder.generation import LocalGenerator, Sampling
    from cache_builder.protocol import EndpointConfig
    from cache_builder.regenerate import Answerer, rows
    from cache_builder.regenerate import regenerate as regenerate_answers
    from cache_builder.target import describe_target, load_config, resolve_target
    from cache_builder.tokens import end_token_ids, load_template

    _require_fitting(context, endpoint, model)
    settings = config.load(BuildConfig, path, overrides)
    try:
        sampling = Sampling(
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
        )
        server = endpoint and EndpointConfig(
            url=endpoint,
            model=model or "",
            concurrency=concurrency,
            is_chat=is_chat,
            is_plain=is_plain,
            timeout_seconds=timeout,
            num_retries=retries,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    place = resolve_target(settings.target)
    template = load_template(place, settings.data)
    answerer: Answerer
    with ExitStack() as stack:
        if server:
            eos_ids = end_token_ids(place, load_config(place))
            key = os.environ.get("OPENAI_API_KEY")
            dispatcher = Dispatcher(Endpoint(server, eos_ids=eos_ids, api_key=key))
            answerer = stack.enter_context(dispatcher)
            generated_by = dispatcher.describe()
        else:
            weights = describe_target(place, settings.target).weights_sha256
            generated_by = f"{name or place.name}@{weights[:16]}"
            answerer = Batches(LocalGenerator(place, settings.target), batch_size)
        report = regenerate_answers(
            answerer,
            template,
            prompts,
            out,
            generated_by=generated_by,
            sampling=sampling,
            max_length=settings.data.max_length,
            unset="server" if is_plain else None,
            limit=limit,
            omit_ids=omit_ids,
        )
    cli.print_table(rows(report))
    if report.num_failed:
        raise EndpointError(
            f"{out}: {report.num_failed} conversations were not answered; the log names them. Run "
            "the same command again: it asks for these only."
        )


def _require_fitting(context: click.Context, endpoint: str | None, model: str | None) -> None:
    """Refuse options of `regenerate` that would be ignored."""
    if endpoint is not None and not model:
        raise click.UsageError("--endpoint needs --model")
    ignored = (
        {"batch_size": "--batch-size", "name": "--name"}
        if endpoint is not None
        else {
            "model": "--model",
            "concurrency": "--concurrency",
            "is_chat": "--chat",
            "is_plain": "--plain",
            "timeout": "--timeout",
            "retries": "--retries",
        }
    )
    for parameter, option in ignored.items():
        if context.get_parameter_source(parameter) is click.core.ParameterSource.COMMANDLINE:
            way = "with" if endpoint is not None else "without"
            raise click.UsageError(f"{option} means nothing {way} --endpoint")


@main.command("import")
@click.argument("kind", type=click.Choice(["speculators", "specforge"]))
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("cache", type=cli.LocationType())
@click.option(
    "--target", required=True, help="Directory (or hub name) of the model that was captured."
)
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
    type=float,
    help=f"Relative difference that is allowed; default: {_CHECK.tolerance:g}.",
)
@click.option("--seed", type=int, help=f"Chooses the K samples; default: {_CHECK.seed}.")
@click.option(
    "--max-quarantined-fraction",
    type=float,
    help="Share of samples with unusable states (not finite, constant) allowed; as in a build.",
)
@click.option("--shard-mib", type=float, help="Raw states of one shard, MiB; as in a build.")
@click.option("--min-free-gb", type=float, help="Disk space that stays free; as in a build.")
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


@main.command("convert-gguf")
@click.argument("gguf", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def convert_gguf(gguf: Path, out: Path) -> None:
    """Convert the model in a GGUF file to a Hugging Face directory, once."""
    from cache_builder.gguf import convert_gguf as convert

    convert(gguf, out)
