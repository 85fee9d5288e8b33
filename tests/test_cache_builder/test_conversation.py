"""Five shapes become conversations; everything else becomes a named reason."""

import json
from collections.abc import Callable
from datetime import date
from typing import Any

import pytest

from cache_builder.conversation import (
    Conversation,
    Drop,
    DropReason,
    PlainText,
    Pretokenized,
)
from cache_builder.record import parse_prompt, parse_record

HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def conversation(record: dict[str, Any]) -> Conversation:
    result = parse_record(record)
    assert isinstance(result, Conversation), result
    return result


def reason(record: object) -> DropReason:
    result = parse_record(record)
    assert isinstance(result, Drop), result
    assert result.detail
    return result.reason


@pytest.mark.parametrize(
    "record",
    [
        pytest.param({"messages": HI}, id="messages"),
        pytest.param(
            {
                "conversations": [
                    {"from": "human", "value": "hi"},
                    {"from": "gpt", "value": "hello"},
                ]
            },
            id="sharegpt",
        ),
        pytest.param({"conversations": HI}, id="sharegpt_with_openai_keys"),
        pytest.param({"prompt": "hi", "response": "hello"}, id="prompt_and_response"),
        pytest.param({"prompt": HI[:1], "response": HI[1:]}, id="prompt_and_response_as_messages"),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, HI[1]]},
            id="text_parts",
        ),
        pytest.param({"messages": HI, "text": "ignored", "conversations": None}, id="first_shape"),
    ],
)
def test_every_shape_of_one_exchange_gives_the_same_messages(record: dict[str, Any]) -> None:
    messages = conversation(record).messages
    assert [(m.role, m.content) for m in messages] == [("user", "hi"), ("assistant", "hello")]


def test_all_roles_are_translated() -> None:
    turns = [
        {"from": "system", "value": "s"},
        {"from": "user", "value": "u"},
        {"from": "assistant", "value": "a"},
        {"from": "tool", "value": "t"},
        {"from": "gpt", "value": "g"},
    ]
    roles = [message.role for message in conversation({"conversations": turns}).messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]


def test_a_system_text_beside_the_turns_is_not_lost() -> None:
    first = conversation({"conversations": HI, "system": "be brief"}).messages[0]
    assert (first.role, first.content) == ("system", "be brief")


def test_plain_text_and_tokens_keep_their_content() -> None:
    text = parse_record({"text": "once", "source": "books"})
    assert text == PlainText(source="books", generated_by=None, is_cut_off=False, text="once")
    tokens = parse_record({"input_ids": [5, 6, 7], "loss_mask": [0, True, 1]})
    assert isinstance(tokens, Pretokenized)
    assert (tokens.token_ids, tokens.loss_mask) == ((5, 6, 7), (0, 1, 1))


def test_source_and_provenance_are_carried() -> None:
    parsed = conversation({"messages": HI, "source": "gsm8k", "answered_by": "Qwen3-8B"})
    assert (parsed.source, parsed.generated_by) == ("gsm8k", "Qwen3-8B")
    assert conversation({"messages": HI}).generated_by is None


@pytest.mark.parametrize(
    ("fields", "is_cut_off"),
    [
        ({}, False),
        ({"finish_reason": "stop"}, False),
        ({"finish_reason": "length"}, True),
        ({"finish_reason": None, "finished": False}, True),
        ({"finished": True}, False),
    ],
)
def test_the_finish_reason_says_whether_the_answer_was_cut_off(
    fields: dict[str, Any], is_cut_off: bool
) -> None:
    assert conversation({"messages": HI, **fields}).is_cut_off is is_cut_off


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param({"content": "4", "reasoning_content": "2+2"}, id="field"),
        pytest.param({"content": "4", "reasoning": "2+2"}, id="field_of_another_name"),
        pytest.param({"content": "<think>\n2+2\n</think>\n\n4"}, id="full_tags"),
        pytest.param({"content": "2+2\n</think>\n\n4"}, id="closing_tag_only"),
    ],
)
def test_the_shapes_of_a_thinking_answer_are_normalized(answer: dict[str, str]) -> None:
    message = conversation({"messages": [HI[0], {"role": "assistant", **answer}]}).messages[1]
    assert (message.content, message.reasoning) == ("4", "2+2")


def test_tool_calls_get_their_arguments_as_an_object() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = [HI[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    message = conversation({"messages": turns}).messages[1]
    assert message.tool_names == ("add",)
    assert message.tool_calls[0]["function"]["arguments"] == {"a": 1}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"messages": [HI[0], {"role": "assistant", **fields}]}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ([1, 2], DropReason.UNKNOWN_SHAPE),
        ("text", DropReason.UNKNOWN_SHAPE),
        ({"question": "hi"}, DropReason.UNKNOWN_SHAPE),
        ({"prompt": "hi"}, DropReason.UNKNOWN_SHAPE),
        ({"messages": [{"role": "narrator", "content": "x"}]}, DropReason.UNKNOWN_ROLE),
        ({"messages": [{"content": "x"}]}, DropReason.UNKNOWN_ROLE),
        ({"messages": [{"role": ["user"], "content": "x"}]}, DropReason.UNKNOWN_ROLE),
        ({"messages": []}, DropReason.NO_ASSISTANT_TURN),
        ({"messages": [{"role": "system", "content": "x"}]}, DropReason.NO_ASSISTANT_TURN),
        (assistant(content=""), DropReason.EMPTY_ASSISTANT_TURN),
        (assistant(content=" \n"), DropReason.EMPTY_ASSISTANT_TURN),
        (assistant(), DropReason.EMPTY_ASSISTANT_TURN),
        (assistant(content="<think>\nand then"), DropReason.EMPTY_ASSISTANT_TURN),
        ({"prompt": "hi", "response": ""}, DropReason.EMPTY_ASSISTANT_TURN),
        (assistant(content="<think>a</think>b</think>c"), DropReason.MALFORMED_THINKING),
        (assistant(content="so <think>a</think>b"), DropReason.MALFORMED_THINKING),
        (assistant(content="<think>a<think>b</think>c"), DropReason.MALFORMED_THINKING),
        (assistant(content="a</think>b", reasoning="c"), DropReason.MALFORMED_THINKING),
        ({"messages": "hi"}, DropReason.BAD_FIELD),
        ({"messages": ["hi"]}, DropReason.BAD_FIELD),
        (assistant(content=7), DropReason.BAD_FIELD),
        (assistant(content=[{"type": "image_url"}]), DropReason.BAD_FIELD),
        (assistant(content="x", tool_calls=3), DropReason.BAD_FIELD),
        (assistant(content="x", tool_calls=[{"id": 1}]), DropReason.BAD_FIELD),
        ({"messages": HI, "tools": "not json"}, DropReason.BAD_FIELD),
        ({"messages": HI, "finish_reason": "whatever"}, DropReason.BAD_FIELD),
        ({"messages": HI, "finished": "yes"}, DropReason.BAD_FIELD),
        ({"messages": HI, "source": 3}, DropReason.BAD_FIELD),
        ({"input_ids": [1, 2]}, DropReason.MASK_NOT_PROVABLE),
        ({"input_ids": [1, 2], "loss_mask": [1]}, DropReason.BAD_FIELD),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, DropReason.BAD_FIELD),
        ({"input_ids": [1, "2"], "loss_mask": [0, 1]}, DropReason.BAD_FIELD),
        ({"input_ids": [1, True], "loss_mask": [0, 1]}, DropReason.BAD_FIELD),
    ],
)
def test_what_cannot_be_used_is_named(record: object, expected: DropReason) -> None:
    assert reason(record) == expected


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def called(arguments: Any) -> dict[str, Any]:
    return assistant(content="", tool_calls=[{"function": {"name": "f", "arguments": arguments}}])


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: called("[" * 100_000), id="arguments_as_text"),
        pytest.param(lambda: called(json.dumps(nested(200))), id="arguments_as_shorter_text"),
        pytest.param(lambda: called(nested(200)), id="arguments"),
        pytest.param(lambda: called({"on": date(2024, 5, 6)}), id="date"),
        pytest.param(lambda: called({"image": b"x"}), id="bytes"),
        pytest.param(lambda: called({b"x": 1}), id="key_of_bytes"),
        pytest.param(lambda: {"messages": HI, "tools": "[" * 100_000}, id="tools_as_text"),
        pytest.param(lambda: {"messages": HI, "tools": [nested(200)]}, id="tools"),
        pytest.param(lambda: {"messages": HI, "tools": [{"at": float("nan")}]}, id="nan"),
        pytest.param(lambda: {"messages": HI, "tools": '[{"at": -Infinity}]'}, id="infinity"),
        pytest.param(
            lambda: {"messages": HI, "chat_template_kwargs": {"a": nested(200)}}, id="kwargs"
        ),
        pytest.param(lambda: {"messages": [{"role": nested(5000)}]}, id="role"),
        pytest.param(lambda: {"messages": HI, "finish_reason": nested(5000)}, id="finish_reason"),
    ],
)
def test_what_json_does_not_hold_or_python_does_not_reach_is_named(
    make: Callable[[], dict[str, Any]],
) -> None:
    record = make()
    assert reason(record) == DropReason.BAD_FIELD
    asked = parse_prompt(record)
    if record.keys() & {"finish_reason", "chat_template_kwargs"}:
        assert isinstance(asked, Conversation)  # of the answers, which are made anew
    else:
        assert isinstance(asked, Drop)
        assert asked.reason == DropReason.BAD_FIELD


def test_arguments_as_deep_as_json_is_written_are_kept() -> None:
    message = conversation(called(json.dumps(nested(20)))).messages[1]
    assert message.tool_calls[0]["function"]["arguments"] == nested(20)


def test_a_thought_that_hit_the_limit_is_an_answer() -> None:
    record = {**assistant(content="<think>\nand then"), "finish_reason": "length"}
    message = conversation(record).messages[1]
    assert (message.content, message.reasoning) == ("", "and then")
