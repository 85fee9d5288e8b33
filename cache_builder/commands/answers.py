"""Commands that look at the data, or make them."""

import os
import sys
from pathlib import Path

import click

from cache_builder.config import BuildConfig
from shared import cli, config
from shared.errors import ConfigError, EndpointError


@click.command()
@cli.config_options
@click.option(
    "-n",
    "num_samples",
    type=click.IntRange(min=0, max=2**31 - 1),
    default=3,
    show_default=True,
    help="Samples.",
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


@click.command()
@cli.config_options
@click.argument("prompts", nargs=-1, required=True)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, help="JSON lines; added to."
)
@click.option(
    "--max-new-tokens",
    type=int,
    default=2048,
    show_default=True,
    help="Tokens of one answer. A prompt may have what they leave of data.max_length.",
)
@click.option(
    "--temperature",
    type=cli.FiniteFloat(min=0.0),
    default=0.0,
    show_default=True,
    help="0: always the most likely.",
)
@click.option(
    "--top-p",
    type=cli.FiniteFloat(min=0.0, max=1.0),
    default=1.0,
    show_default=True,
    help="For temperatures over 0.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="For temperatures over 0.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    help="Prompts at most, those that are answered in the file already included.",
)
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
    help="What to call the target in the rows; default: target.name. Without --endpoint.",
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
    type=cli.FiniteFloat(min=0.0),
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
    from cache_builder.target_config import load_config
    from cache_builder.target_files import describe_target, resolve_target, target_name
    from cache_builder.tokens import describe_rendering, end_token_ids, load_template

    _require_fitting(context, endpoint, model, temperature)
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
    if max_new_tokens >= settings.data.max_length:
        raise ConfigError(
            f"--max-new-tokens {max_new_tokens}: leaves no room for a prompt in data.max_length "
            f"{settings.data.max_length}, the tokens of a sample. Lower it, or raise that."
        )
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
            generated_by = f"{name or target_name(settings.target)}@{weights[:16]}"
            answerer = Batches(LocalGenerator(place, settings.target), batch_size)
        report = regenerate_answers(
            answerer,
            template,
            prompts,
            out,
            generated_by=generated_by,
            rendered_by=describe_rendering(place, template),
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


def _require_fitting(
    context: click.Context, endpoint: str | None, model: str | None, temperature: float
) -> None:
    """Refuse options of `regenerate` that would be ignored."""
    if endpoint is not None and not model:
        raise click.UsageError("--endpoint needs --model")
    of_endpoint = {"--model", "--concurrency", "--chat", "--plain", "--timeout", "--retries"}
    ignored = of_endpoint if endpoint is None else {"--batch-size", "--name"}
    for option in cli.given_options(context):
        if option in ignored:
            way = "with" if endpoint is not None else "without"
            raise click.UsageError(f"{option} means nothing {way} --endpoint")
        if option in ("--seed", "--top-p") and not temperature:
            raise click.UsageError(f"{option} goes with --temperature: at 0 nothing is drawn")


@click.command("convert-gguf")
@click.argument("gguf", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def convert_gguf(gguf: Path, out: Path) -> None:
    """Convert the model in a GGUF file to a Hugging Face directory, once."""
    from cache_builder.gguf import convert_gguf as convert

    convert(gguf, out)
