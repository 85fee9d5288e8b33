"""What rows hold as JSON: tables have values that JSON does not, and text can nest too deeply."""

import base64
import datetime
import math
from collections.abc import Callable
from typing import Any

from cache_builder.conversation import DropReason, RowRefusedError

MAX_DEPTH = 100
"""Lists and objects within each other. Python itself manages some 900."""


def as_json(value: Any, name: str) -> Any:
    """`value` with what JSON does not hold as text: dates in ISO 8601, bytes in base 64.

    Raises:
        RowRefusedError: it is nested too deeply. `name` says where.
    """
    return _walk(value, name, _as_text, MAX_DEPTH)


def require_json(value: Any, name: str) -> None:
    """Refuse what a template or a server cannot be given as JSON.

    Raises:
        RowRefusedError: naming what is in `name`.
    """
    _walk(value, name, _refuse, MAX_DEPTH)


def _walk(value: Any, name: str, other: Callable[[Any, str], Any], depth: int) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else other(value, name)
    if not depth:
        raise RowRefusedError(
            DropReason.BAD_FIELD, f"{name} must be nested at most {MAX_DEPTH} deep"
        )
    if isinstance(value, list):
        return [_walk(part, name, other, depth - 1) for part in value]
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else other(key, name): _walk(part, name, other, depth - 1)
            for key, part in value.items()
        }
    return other(value, name)


def _refuse(value: Any, name: str) -> None:
    found = value if isinstance(value, float) else f"a value of type {type(value).__name__}"
    raise RowRefusedError(DropReason.BAD_FIELD, f"{name} must be JSON, found {found}")


def _as_text(value: Any, name: str) -> Any:
    if isinstance(value, float):
        return value  # Python's JSON has NaN and infinities
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value)
