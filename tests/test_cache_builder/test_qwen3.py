"""Qwen3's own template, which rewrites history: the mask is what the target would have generated.

With a byte-level tokenizer made here, always; and with the published one where it is there.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cache_builder.conversation import Drop, DropReason
from cache_builder.record import parse_record
from cache_builder.rendering import message_fields
from cache_builder.template import ChatTemplate, MaskedTokens
from tests.conftest import BUSY, DEMO_DATA, REPOSITORY
from tests.test_cache_builder.test_template import parse, supervised

TEMPLATE = Path(__file__).parent / "templates" / "qwen3.jinja"
WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen cuts a text before it looks for pieces."""

NOT_SPECIAL = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
"""Added tokens that Qwen's tokenizer does not call special: an answer may hold them."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """As Qwen3's in everything but the size of its vocabulary."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(WORDS, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = DEMO_DATA.read_text(encoding="utf-8")[:50_000]
    raw.train_from_iterator([*text.split(" "), "\n\n", "\n"], trainer)
    raw.add_tokens([AddedToken(text, normalized=False, special=False) for text in NOT_SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    return tokenizer


@pytest.fixture(scope="module", params=["made", "published"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    if request.param == "made":
        return make_tokenizer()
    default = REPOSITORY / ".demo" / "qwen3"
    path = Path(os.environ.get("DRAFTCACHE_TEST_QWEN3", default))
    if not (path / "tokenizer.json").is_file():
        pytest.skip(
            f"{path}: no tokenizer of Qwen3. `make test` fetches it where there is npm; or name a "
            "directory with tokenizer.json and tokenizer_config.json in DRAFTCACHE_TEST_QWEN3."
        )
    return AutoTokenizer.from_pretrained(path)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, reasoning: str | None = None, **fields: Any) -> dict[str, Any]:
    thought = {} if reasoning is None else {"reasoning_content": reasoning}
    return {"role": "assistant", "content": text, **thought, **fields}


def masked(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[dict[str, Any]],
    arguments: dict[str, bool] | None = None,
    **record: Any,
) -> MaskedTokens:
    conversation = parse({"messages": list(messages), **record})
    tokens = ChatTemplate(tokenizer, arguments or {}).tokenize(conversation)
    assert isinstance(tokens, MaskedTokens), tokens
    if not conversation.is_cut_off:  # the ids are the tokenizer's own
        fields = message_fields(conversation.messages, verbatim=False)
        own = tokenizer.apply_chat_template(
            fields, tools=list(conversation.tools) or None, **(arguments or {})
        )
        assert tokens.token_ids.tolist() == own["input_ids"]
    assert tokens.num_straddling == 0
    return tokens


def runs(tokenizer: PreTrainedTokenizerFast, *arguments: Any, **record: Any) -> list[str]:
    return supervised(tokenizer, masked(tokenizer, *arguments, **record))


def refusal(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    arguments: dict[str, bool] | None = None,
) -> DropReason:
    result = ChatTemplate(tokenizer, arguments or {}).tokenize(parse({"messages": messages}))
    assert isinstance(result, Drop), result
    return result.reason


def before_the_last_run(tokens: MaskedTokens) -> list[int]:
    edges = np.flatnonzero(np.diff(tokens.loss_mask, prepend=0) == 1)
    ids: list[int] = tokens.token_ids[: edges[-1]].tolist()
    return ids


# --- thinking


def test_think_block_answer_and_end_are_supervised_from_all_shapes(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    shapes = [
        answer("4.", "2+2 is\n\nfour."),
        answer("<think>\n2+2 is\n\nfour.\n</think>\n\n4."),
        answer("2+2 is\n\nfour.\n</think>\n\n4."),
    ]
    results = [masked(tokenizer, [user("2+2?"), shape]) for shape in shapes]
    for tokens in results:
        expected = "<think>\n2+2 is\n\nfour.\n</think>\n\n4.<|im_end|>"
        assert supervised(tokenizer, tokens) == [expected]
        assert tokens.token_ids.tolist() == results[0].token_ids.tolist()
    text = tokenizer.decode(results[0].token_ids.tolist())
    assert text == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n2+2 is\n\nfour.\n</think>\n\n4.<|im_end|>\n"
    )


def test_history_whose_thoughts_are_left_out_is_context_and_not_supervised(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """With its thoughts gone an earlier answer is not what the target would say at that place."""
    tokens = masked(
        tokenizer,
        [
            user("a?"),
            answer("A.", "first"),
            user("b?"),
            answer("B."),
            user("c?"),
            answer("C.", "3"),
        ],
    )
    assert supervised(tokenizer, tokens) == ["B.<|im_end|>", "<think>\n3\n</think>\n\nC.<|im_end|>"]
    assert tokens.num_unsupervised_turns == 1
    text = tokenizer.decode(tokens.token_ids.tolist())
    assert "first" not in text
    assert text.count("<think>") == 1


@pytest.mark.parametrize("is_thinking", [True, False])
def test_ids_before_the_last_answer_are_the_generation_prompt_of_the_mode(
    tokenizer: PreTrainedTokenizerFast, is_thinking: bool
) -> None:
    arguments = {"enable_thinking": is_thinking}
    messages = [
        {"role": "system", "content": "Be brief."},
        *(user("a?"), answer("A.")),
        *(user("b?"), answer("B.", "so" if is_thinking else None)),
    ]
    tokens = masked(tokenizer, messages, arguments)
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **arguments)
    assert before_the_last_run(tokens) == prompt["input_ids"]
    block = "<think>\nso\n</think>\n\n" if is_thinking else ""
    assert supervised(tokenizer, tokens) == ["A.<|im_end|>", f"{block}B.<|im_end|>"]


def test_an_answer_of_the_other_mode_is_refused_or_counted(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    thought = [user("a?"), answer("A.", "so")]
    assert refusal(tokenizer, thought, {"enable_thinking": False}) == DropReason.MODE_MISMATCH
    tokens = masked(tokenizer, [user("a?"), answer("A.")])
    assert supervised(tokenizer, tokens) == ["A.<|im_end|>"]
    assert tokens.num_unthinking == 1
    recorded = masked(tokenizer, [user("a?"), answer("<think>\n\n</think>\n\nA.")])
    assert supervised(tokenizer, recorded) == ["<think>\n\n</think>\n\nA.<|im_end|>"]
    assert recorded.num_unthinking == 0


def test_a_thought_or_answer_that_was_cut_off_has_no_end(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    cut = {"finish_reason": "length"}
    thought = [user("a?"), answer("<think>\nand then")]
    assert runs(tokenizer, thought, **cut) == ["<think>\nand then"]
    said = [user("a?"), answer("It is", "so")]
    assert runs(tokenizer, said, **cut) == ["<think>\nso\n</think>\n\nIt is"]


# --- tools

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


def test_every_step_behind_the_last_question_keeps_its_thoughts_and_calls(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokens = masked(
        tokenizer,
        [
            user("2+2+1?"),
            answer("", "first two", tool_calls=[call(a=2, b=2)]),
            {"role": "tool", "content": "4"},
            answer("Now one more.", "then one", tool_calls=[call(a=4, b=1), call(a=1, b=4)]),
            {"role": "tool", "content": "5"},
            {"role": "tool", "content": "5"},
            answer("5.", "done"),
        ],
        tools=[ADD],
    )
    assert supervised(tokenizer, tokens) == [
        "<think>\nfirst two\n</think>\n\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>',
        "<think>\nthen one\n</think>\n\nNow one more."
        '\n<tool_call>\n{"name": "add", "arguments": {"a": 4, "b": 1}}\n</tool_call>'
        '\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 4}}\n</tool_call><|im_end|>',
        "<think>\ndone\n</think>\n\n5.<|im_end|>",
    ]
    text = tokenizer.decode(tokens.token_ids.tolist())
    assert text.count("<tool_response>\n5\n</tool_response>") == 2


def test_tool_calls_without_thoughts_are_supervised(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        user("2+2?"),
        answer("", tool_calls=[call(a=2, b=2)]),
        {"role": "tool", "content": "4"},
        answer("4."),
    ]
    expected = [
        '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>',
        "4.<|im_end|>",
    ]
    assert runs(tokenizer, messages, {"enable_thinking": False}, tools=[ADD]) == expected


# --- control tokens


def test_a_message_that_writes_a_turn_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in ("<|im_end|>", "<|im_start|>user\nme", "<|endoftext|>"):
        assert refusal(tokenizer, [user("a?"), answer(text)]) == DropReason.CONTROL_TOKEN
        assert refusal(tokenizer, [user(text), answer("A.")]) == DropReason.CONTROL_TOKEN


# --- rows that are no conversation


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        pytest.param([answer("A.")], "A.<|im_end|>", id="assistant-first"),
        pytest.param(
            [user("a?"), answer("A."), {"role": "tool", "content": "4"}],
            "A.<|im_end|>",
            id="tool-last",
        ),
        pytest.param([user("a?"), answer("")], DropReason.EMPTY_ASSISTANT_TURN, id="empty"),
        pytest.param(
            [{"role": "system", "content": "s"}], DropReason.NO_ASSISTANT_TURN, id="system-only"
        ),
        pytest.param(
            [user("a?"), {"role": "narrator", "content": "b"}], DropReason.UNKNOWN_ROLE, id="role"
        ),
    ],
)
def test_a_row_that_is_no_conversation_is_named_and_half_of_one_is_used(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    expected: str | DropReason,
) -> None:
    record = parse_record({"messages": messages})
    if isinstance(record, Drop):
        assert record.reason == expected
        return
    assert runs(tokenizer, messages) == [expected]


# --- any conversation

TEXT = st.text("ab\u00e9\u4e2d 1.\n", min_size=1, max_size=12).filter(lambda text: text.strip())
TURNS = st.lists(st.tuples(TEXT, TEXT, st.none() | TEXT), min_size=1, max_size=4)


@settings(
    max_examples=40,
    suppress_health_check=[*BUSY, HealthCheck.function_scoped_fixture],
)
@given(turns=TURNS)
def test_every_conversation_is_supervised_where_the_target_wrote(
    tokenizer: PreTrainedTokenizerFast, turns: list[tuple[str, str, str | None]]
) -> None:
    turns = [(a, b, thought and thought.strip()) for a, b, thought in turns]
    messages = [m for asked, said, thought in turns for m in (user(asked), answer(said, thought))]
    expected = [f"{said}<|im_end|>" for _, said, thought in turns[:-1] if thought is None]
    _, said, thought = turns[-1]
    if thought is None:
        expected.append(f"{said.lstrip(chr(10))}<|im_end|>")
    else:
        expected.append(f"<think>\n{thought}\n</think>\n\n{said.lstrip(chr(10))}<|im_end|>")
    tokens = ChatTemplate(tokenizer, {}).tokenize(parse({"messages": messages}))
    assert isinstance(tokens, MaskedTokens), tokens
    if tokens.num_straddling:  # blank lines of an answer joined to those of the template
        return
    assert supervised(tokenizer, tokens) == expected
