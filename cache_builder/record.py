"""One record of the dataset, read into a conversation or refused with a named reason.

Five shapes are known: OpenAI `messages`, ShareGPT `conversations`, `prompt` + `response`, plain
`text`, and `input_ids` + `loss_mask`. A record that cannot be used is a `Drop`, never an
exception: real datasets have bad rows, and each must be counted under its reason.
"""

from typing import Any

from cache_builder.conversation import (
    Conversation,
    Drop,
    DropReason,
    Message,
    PlainText,
    Pretokenized,
    RowRefusedError,
)
from cache_builder.fields import TOO_DEEP, from_json, read_list, read_text
from cache_builder.json_values import require_json
from cache_builder.message import parse_message
from shared.quantity import count

COMPLETE_REASONS = frozenset({"stop", "eos", "tool_calls", "function_call"})
CUT_OFF_REASONS = frozenset({"length", "abort", "content_filter"})


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
        return TOO_DEEP


def _parse(record: object) -> Conversation | PlainText | Pretokenized:
    if not isinstance(record, dict):
        raise RowRefusedError(
            DropReason.UNKNOWN_SHAPE, f"expected an object, found {type(record).__name__}"
        )
    present = {key: value for key, value in record.items() if value is not None}
    is_cut_off = _is_cut_off(present)
    carried: dict[str, Any] = {
        "source": read_text(present, "source"),
        "generated_by": read_text(present, "generated_by")
        or read_text(present, "answered_by")
        or None,
        "is_cut_off": is_cut_off,
        "template_arguments": _template_arguments(present),
    }
    if "input_ids" in present:
        token_ids, loss_mask = _tokens(present)
        return Pretokenized(**carried, token_ids=token_ids, loss_mask=loss_mask)
    if "messages" in present:
        turns = read_list(present, "messages")
    elif "conversations" in present:
        turns = read_list(present, "conversations")
    elif "prompt" in present and "response" in present:
        turns = _turns(present, "prompt", "user") + _turns(present, "response", "assistant")
    elif "text" in present:
        return PlainText(**carried, text=read_text(present, "text"))
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
        return TOO_DEEP


def _parse_prompt(record: object) -> Conversation:
    if not isinstance(record, dict):
        raise RowRefusedError(
            DropReason.UNKNOWN_SHAPE, f"expected an object, found {type(record).__name__}"
        )
    present = {key: value for key, value in record.items() if value is not None}
    if "messages" in present:
        turns = read_list(present, "messages")
    elif "conversations" in present:
        turns = read_list(present, "conversations")
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
        source=read_text(present, "source"),
        generated_by=None,
        is_cut_off=False,
        messages=tuple(asked),
        tools=tuple(_tools(present)),
    )


def _messages(record: dict[str, Any], turns: list[Any]) -> tuple[Message, ...]:
    system = read_text(record, "system")
    messages = tuple(parse_message(turn) for turn in turns)
    if system and not (messages and messages[0].role == "system"):
        messages = (Message(role="system", content=system), *messages)
    return messages


def _unknown_shape(record: dict[str, Any], expected: str) -> RowRefusedError:
    keys = ", ".join(sorted(map(str, record))[:8]) or "none"
    return RowRefusedError(DropReason.UNKNOWN_SHAPE, f"expected {expected}; found the keys {keys}")


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


def _tools(record: dict[str, Any]) -> list[dict[str, Any]]:
    tools = from_json(record.get("tools") or [])
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
    ids, mask = read_list(record, "input_ids"), read_list(record, "loss_mask")
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


def _turns(record: dict[str, Any], key: str, role: str) -> list[Any]:
    if isinstance(record[key], str):
        return [{"role": role, "content": record[key]}]
    return read_list(record, key)
