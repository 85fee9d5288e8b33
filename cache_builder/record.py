"""One record of the dataset, read into a conversation or refused with a named reason.

Five shapes are known: OpenAI `messages`, ShareGPT `conversations`, `prompt` + `response`, plain
`text`, and `input_ids` + `loss_mask`. A record that cannot be used is a `Drop`, never an
exception: real datasets have bad rows, and each must be counted under its reason.
"""

import json
from collections.abc import Mapping
from typing import Any

from cache_builder.conversation import (
    THINK_CLOSE,
    THINK_OPEN,
    Conversation,
    Drop,
    DropReason,
    Message,
    PlainText,
    Pretokenized,
    RowRefusedError,
)
from cache_builder.json_values import require_json
from shared.quantity import count

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

COMPLETE_REASONS = frozenset({"stop", "eos", "tool_calls", "function_call"})
CUT_OFF_REASONS = frozenset({"length", "abort", "content_filter"})


_TOO_DEEP = Drop(DropReason.BAD_FIELD, "a field is nested too deeply")


def parse_record(record: object) -> Conversation | PlainText | Pretokenized | Drop:
    """The conversation, text or tokens of one JSON value, or why it cannot be used.

    Think blocks are accepted as a field of their own, as full tags in the content, or with the
    closing tag only.
    """
    try:
        return _parse(record)
    except RowRefusedError as error:
        return error.drop
    except RecursionError:
        return _TOO_DEEP


def _parse(record: object) -> Conversation | PlainText | Pretokenized:
    if not isinstance(record, dict):
        raise RowRefusedError(
            DropReason.UNKNOWN_SHAPE, f"expected an object, found {type(record).__name__}"
        )
    present = {key: value for key, value in record.items() if value is not None}
    is_cut_off = _is_cut_off(present)
    carried: dict[str, Any] = {
        "source": _text(present, "source"),
        "generated_by": _text(present, "generated_by") or _text(present, "answered_by") or None,
        "is_cut_off": is_cut_off,
        "template_arguments": _template_arguments(present),
    }
    if "input_ids" in present:
        token_ids, loss_mask = _tokens(present)
        return Pretokenized(**carried, token_ids=token_ids, loss_mask=loss_mask)
    if "messages" in present:
        turns = _list(present, "messages")
    elif "conversations" in present:
        turns = _list(present, "conversations")
    elif "prompt" in present and "response" in present:
        turns = _turns(present, "prompt", "user") + _turns(present, "response", "assistant")
    elif "text" in present:
        return PlainText(**carried, text=_text(present, "text"))
    else:
        raise _unknown_shape(
            present,
            "messages, conversations, prompt and response, text, or input_ids and loss_mask",
        )
    messages = _messages(present, turns)
    _check_answers(messages, is_cut_off)
    return Conversation(**carried, messages=messages, tools=tuple(_tools(present)))


def parse_prompt(record: object) -> Conversation | Drop:
    """What a record asks, its answers left out: each assistant turn is empty and to be written.

    A record that ends with the user gets one more. `prompt` may be given without `response`.
    """
    try:
        return _parse_prompt(record)
    except RowRefusedError as error:
        return error.drop
    except RecursionError:
        return _TOO_DEEP


def _parse_prompt(record: object) -> Conversation:
    if not isinstance(record, dict):
        raise RowRefusedError(
            DropReason.UNKNOWN_SHAPE, f"expected an object, found {type(record).__name__}"
        )
    present = {key: value for key, value in record.items() if value is not None}
    if "messages" in present:
        turns = _list(present, "messages")
    elif "conversations" in present:
        turns = _list(present, "conversations")
    elif "prompt" in present:
        turns = _turns(present, "prompt", "user")
    else:
        raise _unknown_shape(present, "messages, conversations or prompt")
    asked: list[Message] = []
    for message in _messages(present, turns):
        if message.role == "tool":
            raise RowRefusedError(
                DropReason.TOOL_RESULT, "the result of a tool depends on the answer before it"
            )
        if message.role != "assistant":
            asked.append(message)
        elif asked and asked[-1].role == "user":
            asked.append(Message(role="assistant", content=""))
    if not any(message.role == "user" for message in asked):
        raise RowRefusedError(
            DropReason.NO_USER_TURN, f"{count(len(turns), 'message')}, none a user's"
        )
    if asked[-1].role != "assistant":
        asked.append(Message(role="assistant", content=""))
    return Conversation(
        source=_text(present, "source"),
        generated_by=None,
        is_cut_off=False,
        messages=tuple(asked),
        tools=tuple(_tools(present)),
    )


def _messages(record: dict[str, Any], turns: list[Any]) -> tuple[Message, ...]:
    system = _text(record, "system")
    messages = tuple(parse_message(turn) for turn in turns)
    if system and not (messages and messages[0].role == "system"):
        messages = (Message(role="system", content=system), *messages)
    return messages


def _unknown_shape(record: dict[str, Any], expected: str) -> RowRefusedError:
    keys = ", ".join(sorted(map(str, record))[:8]) or "none"
    return RowRefusedError(DropReason.UNKNOWN_SHAPE, f"expected {expected}; found the keys {keys}")


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
    fields = {key: _text(turn, key) for key in PASSED_FIELDS if turn.get(key) is not None}
    if role != "assistant":
        return Message(role=role, content=content, fields=fields)
    calls = tuple(_tool_call(call) for call in _list(turn, "tool_calls"))
    reasoning = next((_text(turn, key) for key in REASONING_FIELDS if turn.get(key)), None)
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


def _check_answers(messages: tuple[Message, ...], is_cut_off: bool) -> None:
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not turns:
        raise RowRefusedError(
            DropReason.NO_ASSISTANT_TURN, f"{count(len(messages), 'message')}, none an answer"
        )
    for index in turns:
        message = messages[index]
        is_cut_thought = is_cut_off and index == turns[-1] and bool(message.reasoning)
        if not (message.content.strip() or message.tool_calls or is_cut_thought):
            raise RowRefusedError(DropReason.EMPTY_ASSISTANT_TURN, f"message {index} says nothing")


def _tool_call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object, which is what servers hand to the template."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowRefusedError(
            DropReason.BAD_FIELD, "a tool call must be an object with a function name"
        )
    arguments = function.get("arguments", {})
    parsed = _from_json(arguments)
    function = {**function, "arguments": parsed if isinstance(parsed, dict) else arguments}
    result = {**call, "function": function} if "function" in call else function
    require_json(result, "a tool call")
    return result


def _tools(record: dict[str, Any]) -> list[dict[str, Any]]:
    tools = _from_json(record.get("tools") or [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowRefusedError(DropReason.BAD_FIELD, "tools must be a list of objects")
    require_json(tools, "tools")
    return tools


def _template_arguments(record: dict[str, Any]) -> dict[str, Any]:
    arguments = record.get("chat_template_kwargs", {})
    if not isinstance(arguments, dict):
        raise RowRefusedError(DropReason.BAD_FIELD, "chat_template_kwargs must be an object")
    require_json(arguments, "chat_template_kwargs")
    return arguments


def _tokens(record: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if "loss_mask" not in record:
        raise RowRefusedError(DropReason.MASK_NOT_PROVABLE, "input_ids without loss_mask")
    ids, mask = _list(record, "input_ids"), _list(record, "loss_mask")
    if not all(type(value) is int for value in ids):
        raise RowRefusedError(DropReason.BAD_FIELD, "input_ids must be integers")
    if not all(type(value) in (int, bool) and value in (0, 1) for value in mask):
        raise RowRefusedError(DropReason.BAD_FIELD, "loss_mask must be 0 or 1 everywhere")
    if len(ids) != len(mask):
        raise RowRefusedError(
            DropReason.BAD_FIELD, f"{len(ids)} input_ids but {len(mask)} in loss_mask"
        )
    return tuple(ids), tuple(map(int, mask))


def _is_cut_off(record: dict[str, Any]) -> bool:
    if "finish_reason" in record:
        reason = record["finish_reason"]
        if not isinstance(reason, str) or reason not in COMPLETE_REASONS | CUT_OFF_REASONS:
            known = ", ".join(sorted(COMPLETE_REASONS | CUT_OFF_REASONS))
            raise RowRefusedError(
                DropReason.BAD_FIELD, f"finish_reason {reason!r} is none of {known}"
            )
        return reason in CUT_OFF_REASONS
    finished = record.get("finished", True)
    if not isinstance(finished, bool):
        raise RowRefusedError(
            DropReason.BAD_FIELD, f"finished must be true or false, found {finished!r}"
        )
    return not finished


def _from_json(value: Any) -> Any:
    """The value that a text holds as JSON; anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
    except RecursionError:
        raise RowRefusedError(_TOO_DEEP.reason, _TOO_DEEP.detail) from None


def _turns(record: dict[str, Any], key: str, role: str) -> list[Any]:
    if isinstance(record[key], str):
        return [{"role": role, "content": record[key]}]
    return _list(record, key)


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
        return "".join(_text(part, "text") for part in parts)
    return _text({"content": value}, "content")


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key, "")
    if not isinstance(value, str):
        raise RowRefusedError(
            DropReason.BAD_FIELD, f"{key} must be text, found {type(value).__name__}"
        )
    return value


def _list(record: dict[str, Any], key: str) -> list[Any]:
    value = record.get(key) or []
    if not isinstance(value, list):
        raise RowRefusedError(
            DropReason.BAD_FIELD, f"{key} must be a list, found {type(value).__name__}"
        )
    return value
