"""What the two command lines share: options, and errors as one line with exit code 1."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from shared import log
from shared.errors import DraftCacheError
from shared.memory import keep_freed_memory

F = TypeVar("F", bound=Callable[..., Any])


def config_options(command: F) -> F:
    """`--config FILE` and `--set section.key=value`, passed as `path` and `overrides`."""
    command = click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        help="Change one setting of the file. May be given many times.",
    )(command)
    return click.option(
        "--config",
        "path",
        type=click.Path(path_type=Path),
        required=True,
        help="TOML file with the settings.",
    )(command)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, sort_keys=True))


def print_table(rows: list[tuple[str, str]]) -> None:
    """Two columns, the first as wide as its widest entry."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:<{width}}  {value}")


def run(group: click.Group) -> None:
    """Run a command line: 0 done, 1 an error of ours, 2 wrong usage, 130 interrupted."""
    log.configure()
    keep_freed_memory()
    try:
        sys.exit(group.main(standalone_mode=False) or 0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        logging.getLogger(__name__).error("interrupted")
        sys.exit(130)
    except DraftCacheError as error:
        click.echo(f"Error: {' '.join(str(error).split())}", err=True)
        sys.exit(1)
