"""Offline directories of vllm-project/speculators.

An Arrow data set (`datasets.save_to_disk`) with `input_ids` and `loss_mask`, and for row i a file
`hidden_states/hs_{i}.safetensors` with `token_ids` [T] and `hidden_states` [T, S, D].
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cache_builder.importing.source import (
    Place,
    SampleSkippedError,
    SkipReason,
    SourceTokens,
    StoredShape,
    check_dtype,
    check_lengths,
    check_mask,
)
from shared.errors import DataError

_NAME = re.compile(r"hs_(\d+)\.safetensors")
_PATTERN = "hs_*.safetensors"
_COLUMNS = ("input_ids", "loss_mask")


class SpeculatorsSource:
    """One such directory, open for reading."""

    def __init__(self, root: Path, states: Path | None = None) -> None:
        """Open the data set in `root`; its states are in `states`, or `root`/hidden_states.

        Raises:
            DataError: it is not such a directory, or the package `datasets` is missing.
        """
        self.root = states if states is not None else root / "hidden_states"
        self._dataset_root = root
        self._rows = _load_rows(root)
        if not self.root.is_dir():
            raise DataError(
                f"{self.root}: no such directory; expected the hs_*.safetensors of {root}. If "
                "they are elsewhere, name the directory with --states."
            )
        found = (_NAME.fullmatch(path.name) for path in self.root.iterdir())
        self._numbers = {int(match[1]) for match in found if match}
        if not self._numbers:
            pickles = sorted(path.name for path in self.root.glob("*.pt"))
            raise DataError(
                f"{self.root}: no hs_*.safetensors. "
                + (
                    f"It has {pickles[0]}: states as pickles, of an old version of speculators, "
                    "are not read. Capture them with a newer one."
                    if pickles
                    else "Name the directory that has them with --states."
                )
            )

    def places(self) -> Iterator[Place]:
        for number in range(len(self._rows)):
            yield Place(_PATTERN, number)
        for number in sorted(self._numbers):
            if number >= len(self._rows):
                yield Place(_PATTERN, number)

    def files(self) -> Iterator[tuple[str, int, int]]:
        for path in sorted(self._dataset_root.glob("*.arrow")):
            status = path.stat()
            yield path.name, status.st_size, status.st_mtime_ns
        for number in sorted(self._numbers):
            name = Place(_PATTERN, number).name
            status = (self.root / name).stat()
            yield name, status.st_size, status.st_mtime_ns

    def tokens(self, place: Place) -> SourceTokens:
        if place.number not in self._numbers:
            raise SampleSkippedError(
                SkipReason.NO_STATES, f"row {place.number}: {self.root / place.name} is missing"
            )
        if place.number >= len(self._rows):
            raise SampleSkippedError(
                SkipReason.NO_ROW,
                f"{self.root / place.name}: the data set has {len(self._rows)} rows only; it was "
                "prepared anew after the capture",
            )
        where = str(self.root / place.name)
        try:
            with safe_open(self.root / place.name, "pt") as file:
                slice_ = _states_of(file, where)
                size, dtype = slice_.get_shape(), slice_[:0].dtype
                stored_ids = file.get_tensor("token_ids").numpy().reshape(-1)
        except (SafetensorError, OSError) as error:
            raise SampleSkippedError(SkipReason.UNREADABLE, f"{where}: {error}") from None
        row = self._rows[place.number]
        ids, mask = (np.asarray(row[name], np.int64) for name in _COLUMNS)
        if not np.array_equal(ids, stored_ids):
            raise SampleSkippedError(
                SkipReason.TOKENS_DIFFER,
                f"{where}: its token_ids ({len(stored_ids)}) are not the input_ids of row "
                f"{place.number} ({len(ids)}); the data set was prepared anew after the capture",
            )
        check_lengths(size[0], len(ids), len(mask), where)
        shape = StoredShape(size[1], size[2], check_dtype(dtype, where))
        return SourceTokens(ids, check_mask(mask, where), 0, shape)

    def states(self, place: Place) -> tuple[npt.NDArray[np.int64], Tensor]:
        where = self.root / place.name
        try:
            with safe_open(where, "pt") as file:
                ids = file.get_tensor("token_ids").numpy().reshape(-1).astype(np.int64)
                return ids, file.get_tensor("hidden_states")
        except (SafetensorError, OSError) as error:
            raise SampleSkippedError(SkipReason.UNREADABLE, f"{where}: {error}") from None


def _states_of(file: Any, where: str) -> Any:
    keys = set(file.keys())
    if not {"token_ids", "hidden_states"} <= keys:
        raise DataError(
            f"{where}: expected token_ids and hidden_states, found {', '.join(sorted(keys))}."
        )
    states = file.get_slice("hidden_states")
    if len(states.get_shape()) != 3:
        raise DataError(
            f"{where}: hidden_states has shape {states.get_shape()}; expected [tokens, layers, "
            "hidden size]."
        )
    return states


def _load_rows(root: Path) -> Any:
    """The data set in `root`, whose rows have arrays of `_COLUMNS`."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            "importing a speculators directory needs the package `datasets`: "
            "pip install 'draftcache[import]'"
        ) from None
    if not (root / "dataset_info.json").is_file():
        raise DataError(
            f"{root}: no dataset_info.json; expected the directory that speculators' data "
            "preparation wrote (datasets.save_to_disk)."
        )
    try:
        rows = datasets.load_from_disk(str(root))
    except Exception as error:  # Arrow, JSON, and what else a damaged data set raises
        raise DataError(f"{root}: datasets cannot load it ({error}).") from error
    if missing := [name for name in _COLUMNS if name not in rows.column_names]:
        raise DataError(
            f"{root}: no column {', '.join(missing)}; it has {', '.join(rows.column_names)}. "
            "Without a loss mask it is not known what the target generated: prepare the data anew."
        )
    return rows.with_format("numpy", columns=list(_COLUMNS))
