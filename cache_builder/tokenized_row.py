"""One row of the data as ids and mask, or why it cannot be used: a pure function of the row."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cache_builder.conversation import (
    Conversation,
    Drop,
    DropReason,
    PlainText,
    Pretokenized,
    RowRefusedError,
)
from cache_builder.record import parse_record
from cache_builder.template import ChatTemplate, MaskedTokens
from shared.quantity import count

MAX_ID = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRules:
    """What `data` of the configuration says of rows."""

    vocab_size: int
    max_length: int
    truncation: Literal["cut", "drop"]
    cut_off_answers: Literal["keep", "drop"]
    supervise_text: bool

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ValueError(f"max_length must be at least 2, got {self.max_length}")


@dataclass(frozen=True, eq=False, slots=True)
class TokenizedRow:
    tokens: MaskedTokens
    """At most as many as the rules allow."""

    is_truncated: bool
    source: str
    """As the row says; empty: it does not say."""

    generated_by: str | None


@dataclass(frozen=True, eq=False, slots=True)
class RowOutcome:
    result: TokenizedRow | Drop
    is_cut_off: bool = False
    """The row's last answer hit a limit when it was generated, whether the row is used or not."""


def tokenize_row(row: Any, template: ChatTemplate, rules: RowRules) -> RowOutcome:
    """What becomes of the JSON value `row`. A `Drop` stays what it is."""
    if isinstance(row, Drop):
        return RowOutcome(row)
    record = parse_record(row)
    if isinstance(record, Drop):
        return RowOutcome(record)
    try:
        return RowOutcome(_tokenize(record, template, rules), record.is_cut_off)
    except RowRefusedError as error:
        return RowOutcome(error.drop, record.is_cut_off)


def _tokenize(
    record: Conversation | PlainText | Pretokenized, template: ChatTemplate, rules: RowRules
) -> TokenizedRow:
    if record.is_cut_off and rules.cut_off_answers == "drop":
        raise RowRefusedError(DropReason.CUT_OFF, "the answer hit the token limit")
    tokens = _ids_and_mask(record, template, supervise_text=rules.supervise_text)
    _check_ids(tokens.token_ids, template.bos_id, rules.vocab_size)
    is_longer = len(tokens.token_ids) > rules.max_length
    if is_longer and rules.truncation == "drop":
        raise RowRefusedError(
            DropReason.TOO_LONG,
            f"{count(len(tokens.token_ids), 'token')}, at most {rules.max_length:,}",
        )
    kept = tokens.cut(rules.max_length)
    _check_supervision(kept.loss_mask, is_truncated=is_longer)
    return TokenizedRow(kept, is_longer, record.source, record.generated_by)


def _ids_and_mask(
    record: Conversation | PlainText | Pretokenized, template: ChatTemplate, *, supervise_text: bool
) -> MaskedTokens:
    tokens: MaskedTokens | Drop
    match record:
        case Conversation():
            tokens = template.tokenize(record)
        case PlainText() if supervise_text:
            tokens = template.tokenize_text(record.text)
        case PlainText():
            tokens = Drop(
                DropReason.MASK_NOT_PROVABLE,
                "plain text does not show what the target would generate; "
                "data.supervise_text = true takes every token of it for that",
            )
        case Pretokenized():
            template.require_arguments(record.template_arguments)
            # Ids beyond int32 are out of range for any target; clipped, they still are.
            ids = [max(-1, min(value, MAX_ID)) for value in record.token_ids]
            tokens = MaskedTokens(np.array(ids, np.int32), np.array(record.loss_mask, np.uint8))
    if isinstance(tokens, Drop):
        raise RowRefusedError(tokens.reason, tokens.detail)
    return tokens


def _check_ids(ids: npt.NDArray[np.int32], bos_id: int | None, vocab_size: int) -> None:
    if len(outside := np.flatnonzero((ids < 0) | (ids >= vocab_size))):
        raise RowRefusedError(
            DropReason.ID_OUT_OF_RANGE,
            f"id {ids[outside[0]]} at position {outside[0]}, expected 0 to {vocab_size - 1}",
        )
    if bos_id is not None and ids[:2].tolist() == [bos_id, bos_id]:
        raise RowRefusedError(DropReason.DOUBLE_BOS, f"begin token {bos_id} twice at the start")


def _check_supervision(mask: npt.NDArray[np.uint8], *, is_truncated: bool) -> None:
    """A block is drafted from a supervised token to the supervised ones behind it: two at least."""
    if not (mask[:-1] & mask[1:]).any():
        raise RowRefusedError(
            DropReason.TRUNCATED_WITHOUT_SUPERVISION if is_truncated else DropReason.TOO_SHORT,
            f"no two adjacent supervised tokens in {len(mask)}",
        )
