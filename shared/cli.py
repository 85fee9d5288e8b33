"""What the two command lines share: options, and errors as one line with exit code 1."""

import json
import logging
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

import click
from click.core import ParameterSource

from shared import log
from shared.errors import ConfigError, DraftCacheError
from shared.location import Location, parse_location
from shared.memory import keep_freed_memory

logger = logging.getLogger(__name__)

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


class LocationType(click.ParamType):  # type: ignore[type-arg]  # generic only in the stubs
    """A directory, or `s3://BUCKET/PREFIX`."""

    name = "location"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Location:
        if not isinstance(value, str):
            return cast(Location, value)  # click may ask twice
        try:
            return parse_location(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class FiniteFloat(click.FloatRange):
    """A number in a range: neither NaN, which no comparison keeps out, nor infinity."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def given_options(context: click.Context) -> list[str]:
    """Options that the command line has, by their first names; not those left to their default."""
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if isinstance(parameter, click.Option)
        and parameter.name is not None
        and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, sort_keys=True))


def print_table(rows: list[tuple[str, str]]) -> None:
    """Two columns, the first as wide as its widest entry."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:<{width}}  {value}")


def run(group: click.Group) -> None:
    """Run a command line: 0 done, 1 an error of ours, 2 wrong usage, 130 interrupted (143 by
    SIGTERM, which unwinds like Ctrl-C).
    """
    log.configure()
    keep_freed_memory()
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        sys.exit(group.main(standalone_mode=False) or 0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt) as stop:
        cause = stop.__cause__ if isinstance(stop, click.Abort) else stop  # click wraps it
        words = [str(cause)] if cause is not None and str(cause) else []
        is_term = isinstance(cause, _TerminatedError)
        word = "terminated" if is_term else "interrupted"
        logger.error("%s", ": ".join([word, *words]), extra=log.event(word))
        sys.exit(143 if is_term else 130)
    except DraftCacheError as error:
        line = " ".join(str(error).split())
        if log.is_json():
            extra = log.event("error", kind=type(error).__name__)
            logger.error("%s", line, extra=extra)
        else:
            click.echo(f"Error: {line}", err=True)
        sys.exit(1)
    finally:
        signal.signal(signal.SIGTERM, before)


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _TerminatedError
