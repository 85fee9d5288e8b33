"""What an importer needs of another tool's directory, whatever its layout.

T tokens of one sample   S stored states per token   D hidden size
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shared.errors import DataError

STORED_DTYPES = (torch.bfloat16, torch.float32)
"""float32 is rounded to bfloat16, as the target's own states are."""


class SkipReason(StrEnum):
    NO_STATES = "no_states"
    """A row without a states file: the capture failed there, or never came to it."""

    NO_ROW = "no_row"
    """A states file without a row of the data set."""

    UNREADABLE = "unreadable"
    """The states file is cut off or damaged."""

    TOKENS_DIFFER = "tokens_differ"
    ROWS_DIFFER = "rows_differ"
    MASK_DIFFERS = "mask_differs"
    ID_OUT_OF_RANGE = "id_out_of_range"
    TOO_SHORT = "too_short"
    DUPLICATE = "duplicate"


MISMATCHES = frozenset(
    {SkipReason.TOKENS_DIFFER, SkipReason.ROWS_DIFFER, SkipReason.MASK_DIFFERS, SkipReason.NO_ROW}
)
"""States and tokens do not belong together: more of the directory may be wrong than this file."""


class SampleSkippedError(Exception):
    """One sample that cannot be imported. Caught where samples are counted, never by a user."""

    def __init__(self, reason: SkipReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Place:
    """Where one sample lies: `pattern` with its last `*` replaced by `number`, below the source."""

    pattern: str
    number: int

    @property
    def name(self) -> str:
        before, _, after = self.pattern.rpartition("*")
        return f"{before}{self.number}{after}"


@dataclass(frozen=True, slots=True)
class StoredShape:
    """The states of one sample in their file."""

    num_stored: int
    """States per token."""

    hidden_size: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False, slots=True)
class SourceTokens:
    token_ids: npt.NDArray[np.int64]
    """int64 [T], without padding."""

    loss_mask: npt.NDArray[np.uint8]
    """uint8 [T], 0 or 1."""

    num_padding: int
    """Positions of the file behind the T that are left out."""

    shape: StoredShape


class StateSource(Protocol):
    """A directory of captured states."""

    root: Path

    def places(self) -> Iterator[Place]:
        """Every sample that there should be, in an order that does not change."""

    def files(self) -> Iterator[tuple[str, int, int]]:
        """Name below `root`, size and modification time (ns) of everything that is read."""

    def tokens(self, place: Place) -> SourceTokens:
        """Read a sample without its states.

        Raises:
            SampleSkippedError: it cannot be imported.
            DataError: the file is not of this layout at all.
        """

    def states(self, place: Place) -> tuple[npt.NDArray[np.int64], Tensor]:
        """Token ids int64 [T] as they are beside the states, and states [T, S, D] as stored.

        Raises:
            SampleSkippedError: it cannot be read any more.
        """


def check_lengths(num_states: int, num_tokens: int, num_mask: int, where: str) -> None:
    """Refuse states of other length than their tokens: every later sample would be shifted.

    Raises:
        SampleSkippedError: naming the lengths.
    """
    if num_states != num_tokens:
        raise SampleSkippedError(
            SkipReason.ROWS_DIFFER,
            f"{where}: {num_states} rows of states for {num_tokens} tokens (vLLM with prefix "
            "caching stores too few)",
        )
    if num_mask != num_tokens:
        raise SampleSkippedError(
            SkipReason.MASK_DIFFERS, f"{where}: {num_mask} mask entries for {num_tokens} tokens"
        )


def check_mask(mask: npt.NDArray[np.int64], where: str) -> npt.NDArray[np.uint8]:
    """`mask` as uint8.

    Raises:
        DataError: something in it is neither 0 nor 1.
    """
    if not np.isin(mask, (0, 1)).all():
        raise DataError(f"{where}: loss_mask holds {int(mask.max())}; expected 0 and 1 only.")
    return mask.astype(np.uint8)


def check_dtype(dtype: torch.dtype, where: str) -> torch.dtype:
    """`dtype` if states of it can be imported.

    Raises:
        DataError: they cannot.
    """
    if dtype not in STORED_DTYPES:
        hint = (
            " Massive activations leave the range of float16, so such states cannot be trusted: "
            "capture them anew in bfloat16."
            if dtype == torch.float16
            else ""
        )
        raise DataError(
            f"{where}: states are {_name(dtype)}; expected "
            f"{' or '.join(map(_name, STORED_DTYPES))}.{hint}"
        )
    return dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
