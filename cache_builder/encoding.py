"""A text as tokens that know which characters they cover."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cache_builder.conversation import DropReason, RowRefusedError
from shared.errors import TargetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Stop:
    """A special token in a text: it may end a turn."""

    start: int
    end: int
    is_eos: bool


@dataclass(frozen=True, eq=False, slots=True)
class Encoding:
    ids: npt.NDArray[np.int64]
    """int64 [S]."""

    starts: npt.NDArray[np.int64]
    """int64 [S]: first character of each token."""

    ends: npt.NDArray[np.int64]
    """int64 [S]: past the last character of each token, ascending."""

    stops: tuple[Stop, ...]

    def mark(self, start: int, end: int) -> tuple[npt.NDArray[np.bool_], int]:
        """Tokens inside the characters `start` to `end`, and the number across an edge of them."""
        touching = (self.starts < end) & (self.ends > start)
        inside = touching & (self.starts >= start) & (self.ends <= end)
        return inside, int((touching & ~inside).sum())


class Encoder:
    """The tokenizer of one target, adding no special tokens of its own."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Check that the tokenizer gives offsets.

        Raises:
            TargetError: it does not.
        """
        if not tokenizer.is_fast:
            raise TargetError(
                f"{tokenizer.name_or_path}: the tokenizer gives no character offsets, so answers "
                "cannot be located. Add a tokenizer.json to the target."
            )
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._special_ids = np.array([i for i, token in added if token.special], np.int64)

    def encode(self, text: str) -> Encoding:
        """Tokens of `text`.

        Raises:
            RowRefusedError: it is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RowRefusedError(
                DropReason.BAD_FIELD, "a text holds half of a surrogate pair"
            ) from None
        output = self._tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        ids = np.array(output["input_ids"], np.int64)
        offsets = np.array(output["offset_mapping"], np.int64).reshape(-1, 2)
        ends = np.maximum.accumulate(offsets[:, 1])
        # Some tokenizers leave a token's leading space out of its offsets. It starts where the
        # token before it ends; else a token across the edge of an answer would look like its first.
        starts = np.minimum(offsets[:, 0], np.concatenate([[0], ends])[: len(ids)])
        special = np.flatnonzero(np.isin(ids, self._special_ids))
        for i in special:
            # Some special tokens swallow the white space around them, which is not their text.
            covered = text[starts[i] : ends[i]]
            starts[i] += len(covered) - len(covered.lstrip())
            ends[i] -= len(covered) - len(covered.rstrip())
        eos_id = self._tokenizer.eos_token_id
        stops = tuple(Stop(int(starts[i]), int(ends[i]), bool(ids[i] == eos_id)) for i in special)
        return Encoding(ids, starts, ends, stops)

    def encode_document(self, text: str) -> npt.NDArray[np.int64]:
        """Ids of plain text, with one begin token where the tokenizer puts one before text."""
        ids = self.encode(text).ids
        bos = self._tokenizer.bos_token_id
        if bos is None or self._tokenizer("").input_ids[:1] != [bos] or ids[:1].tolist() == [bos]:
            return ids
        return np.concatenate([[bos], ids])
