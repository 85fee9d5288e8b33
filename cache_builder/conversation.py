"""What a dataset holds: conversations, plain text or tokens, and the reasons to leave one out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class DropReason(StrEnum):
    UNKNOWN_SHAPE = "unknown_shape"
    BAD_FIELD = "bad_field"
    UNKNOWN_ROLE = "unknown_role"
    NO_USER_TURN = "no_user_turn"
    NO_ASSISTANT_TURN = "no_assistant_turn"
    EMPTY_ASSISTANT_TURN = "empty_assistant_turn"
    MALFORMED_THINKING = "malformed_thinking"
    THINKING_NOT_RENDERED = "thinking_not_rendered"
    TOOL_RESULT = "tool_result"
    MODE_MISMATCH = "mode_mismatch"
    TEMPLATE_REFUSED = "template_refused"
    CONTROL_TOKEN = "control_token"
    MASK_NOT_PROVABLE = "mask_not_provable"
    DOUBLE_BOS = "double_bos"
    ID_OUT_OF_RANGE = "id_out_of_range"
    TOO_SHORT = "too_short"
    TRUNCATED_WITHOUT_SUPERVISION = "truncated_without_supervision"
    TOO_LONG = "too_long"
    CUT_OFF = "cut_off"
    DUPLICATE = "duplicate"
    NOT_CHOSEN = "not_chosen"


@dataclass(frozen=True, slots=True)
class Drop:
    """Why one record is left out."""

    reason: DropReason
    detail: str


class RowRefusedError(Exception):
    """Carries a `Drop` out of nested helpers. Caught where rows are read, never by a user."""

    def __init__(self, reason: DropReason, detail: str) -> None:
        super().__init__(detail)
        self.drop = Drop(reason, detail)


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    role: str
    """One of `system`, `user`, `assistant`, `tool`."""

    content: str
    """The text without think tags."""

    reasoning: str | None = None
    """Text of the think block. None: the record has no block; empty: it has an empty one."""

    verbatim: str | None = None
    """The recorded text, where it carried think tags of its own."""

    tool_calls: tuple[Mapping[str, Any], ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    """Further fields for the chat template, such as `name`."""

    @property
    def tool_names(self) -> tuple[str, ...]:
        return tuple(call.get("function", call)["name"] for call in self.tool_calls)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What every shape carries besides its content."""

    source: str
    """Where the record says it comes from; empty: it does not say."""

    generated_by: str | None
    """The model that wrote the answers, as the record says. None: it does not say."""

    is_cut_off: bool
    """The last answer hit a limit: the model never ended it."""

    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Template arguments the answers were generated with, as the record says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation(Record):
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the last assistant turn."""
        last = max(i for i, message in enumerate(self.messages) if message.role == "assistant")
        return self.messages[:last]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainText(Record):
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Pretokenized(Record):
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
