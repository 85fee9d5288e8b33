"""The command line of stage one."""

import click

from cache_builder.commands import answers, capture, checks, reuse


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


for _command in (
    capture.build,
    capture.estimate,
    capture.repair,
    answers.preview,
    answers.regenerate,
    answers.convert_gguf,
    checks.inspect,
    checks.verify,
    reuse.prune,
    reuse.merge,
    reuse.import_command,
):
    main.add_command(_command)
