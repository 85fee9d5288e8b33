"""One message of a record, or of a server: its role, its thinking, its tool calls."""

from typing import Any

from cache_builder.conversation import (
    THINK_CLOSE,
    THINK_OPEN,
    DropReason,
    Message,
    RowRefusedError,
)
from cache_builder.fields import from_json, read_list, read_text
from cache_builder.json_values import require_json

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
PASSED_FIELDS = ("name", "tool_call_id")
"""Fields of a message that a chat template may read besides role, content and tool calls."""


def parse_message(turn: Any) -> Message:
    """One message of a record, or of a server.

    Raises:
        RowRefusedError: it cannot be used.
    """
    if not isinstance(turn, dict):
        raise RowRefusedError(
            DropReason.BAD_FIELD, f"a message must be an object, found {type(turn).__name__}"
        )
    name = turn.get("role", turn.get("from"))
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        known = ", ".join(ROLES)
        raise RowRefusedError(DropReason.UNKNOWN_ROLE, f"role {name!r} is none of {known}")
    content = _content(turn.get("content", turn.get("value")))
    fields = {key: read_text(turn, key) for key in PASSED_FIELDS if turn.get(key) is not None}
    if role != "assistant":
        return Message(role=role, content=content, fields=fields)
    calls = tuple(_tool_call(call) for call in read_list(turn, "tool_calls"))
    reasoning = next((read_text(turn, key) for key in REASONING_FIELDS if turn.get(key)), None)
    said: dict[str, Any] = {"content": content, "reasoning": reasoning}
    if THINK_OPEN in content or THINK_CLOSE in content:
        said = _split_thinking(content, reasoning)
    return Message(role=role, tool_calls=calls, fields=fields, **said)


def _split_thinking(content: str, reasoning: str | None) -> dict[str, Any]:
    """What an answer with full tags, a closing tag only or an unclosed block says."""
    opens, closes = content.count(THINK_OPEN), content.count(THINK_CLOSE)
    is_first = content.lstrip().startswith(THINK_OPEN)
    if reasoning is not None or opens > 1 or closes > 1 or (opens and not is_first):
        raise RowRefusedError(
            DropReason.MALFORMED_THINKING,
            "expected one think block at the start of the answer, or a reasoning field; found "
            f"{opens} opening and {closes} closing tags",
        )
    block, _, answer = content.partition(THINK_CLOSE)
    return {
        "content": answer.lstrip("\n"),
        "reasoning": block.lstrip().removeprefix(THINK_OPEN).strip("\n"),
        "verbatim": content,
    }


def _tool_call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object, which is what servers hand to the template."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowRefusedError(
            DropReason.BAD_FIELD, "a tool call must be an object with a function name"
        )
    arguments = function.get("arguments", {})
    parsed = from_json(arguments)
    function = {**function, "arguments": parsed if isinstance(parsed, dict) else arguments}
    result = {**call, "function": function} if "function" in call else function
    require_json(result, "a tool call")
    return result


def _content(value: Any) -> str:
    """The text of a message: a string, nothing (a bare tool call), or text parts joined."""
    if value is None:
        return ""
    if isinstance(value, list):
        parts = [part if isinstance(part, dict) else {} for part in value]
        if any(part.get("type") != "text" for part in parts):
            raise RowRefusedError(
                DropReason.BAD_FIELD, "content parts other than text cannot be used"
            )
        return "".join(read_text(part, "text") for part in parts)
    return read_text({"content": value}, "content")
