"""Fields of a row, read as what they must be, or refused by name."""

import json
from collections.abc import Mapping
from typing import Any

from cache_builder.conversation import Drop, DropReason, RowRefusedError

TOO_DEEP = Drop(DropReason.BAD_FIELD, "a field is nested too deeply")


def from_json(value: Any) -> Any:
    """The value that a text holds as JSON; anything else as it is.

    Raises:
        RowRefusedError: it is nested too deeply.
    """
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
    except RecursionError:
        raise RowRefusedError(TOO_DEEP.reason, TOO_DEEP.detail) from None


def read_text(record: Mapping[str, Any], key: str) -> str:
    """A field's text; empty where there is none.

    Raises:
        RowRefusedError: it is something else.
    """
    value = record.get(key, "")
    if not isinstance(value, str):
        raise RowRefusedError(
            DropReason.BAD_FIELD, f"{key} must be text, found {type(value).__name__}"
        )
    return value


def read_list(record: dict[str, Any], key: str) -> list[Any]:
    """A field's list; empty where there is none.

    Raises:
        RowRefusedError: it is something else.
    """
    value = record.get(key) or []
    if not isinstance(value, list):
        raise RowRefusedError(
            DropReason.BAD_FIELD, f"{key} must be a list, found {type(value).__name__}"
        )
    return value
