"""A text as tokens that know which characters they cover."""

from dataclasses import dataclass
from functools import cached_property
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

    token_id: int
    start: int
    end: int


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

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that the tokenizer calls special."""
        return frozenset(self._special_ids.tolist())

    @cached_property
    def _spaced_ids(self) -> npt.NDArray[np.int64]:
        """Tokens whose text begins with a space, as byte-level and sentence pieces write it."""
        vocab = self._tokenizer.get_vocab()
        return np.array([i for token, i in vocab.items() if token[:1] in ("Ġ", "▁")], np.int64)

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
        # Some tokenizers leave a token's own leading space out of its offsets. It starts where the
        # token before it ends; else a token across the edge of an answer would look like its first.
        starts, ended = offsets[:, 0], np.concatenate([[0], ends])[: len(ids)]
        gaps = np.flatnonzero(starts > ended)
        gaps = gaps[np.isin(ids[gaps], self._spaced_ids)] if len(gaps) else gaps
        starts[gaps] = ended[gaps]
        special = np.flatnonzero(np.isin(ids, self._special_ids))
        for i in special:
            # Some special tokens swallow the white space around them, which is not their text.
            covered = text[starts[i] : ends[i]]
            starts[i] += len(covered) - len(covered.lstrip())
            ends[i] -= len(covered) - len(covered.rstrip())
        stops = tuple(Stop(int(ids[i]), int(starts[i]), int(ends[i])) for i in special)
        return Encoding(ids, starts, ends, stops)

    def encode_document(self, text: str) -> npt.NDArray[np.int64]:
        """Ids of plain text, with one begin token where the tokenizer puts one before text."""
        ids = self.encode(text).ids
        bos = self._tokenizer.bos_token_id
        if bos is None or self._tokenizer("").input_ids[:1] != [bos] or ids[:1].tolist() == [bos]:
            return ids
        return np.concatenate([[bos], ids])
