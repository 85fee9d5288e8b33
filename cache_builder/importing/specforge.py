"""Offline DFlash directories of sgl-project/SpecForge.

`rows_{g}-{h}/data_{i}.ckpt` or `.ckpt.gz`, each a `torch.save` of one record: `input_ids` [P],
`loss_mask` [P], `hidden_states` [1, P, S D] or [P, S D]. P counts padding. They are pickles, and
read with `weights_only=True`: tensors and plain containers, never code.
"""

import gzip
import io
import pickle
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
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

_NAME = re.compile(r"data_(\d+)(\.ckpt(?:\.gz)?)")
_KEYS = ("input_ids", "loss_mask", "hidden_states")
_DAMAGED = (RuntimeError, EOFError, OSError, ValueError, KeyError, zlib.error)


class SpecForgeSource:
    """One such directory, open for reading."""

    def __init__(self, root: Path, hidden_size: int) -> None:
        """Find the records below `root`; `hidden_size` is the target's.

        Raises:
            DataError: there are none.
        """
        self.root = root
        self._hidden_size = hidden_size
        self._places = []
        for path in sorted(root.rglob("data_*")) if root.is_dir() else []:
            if match := _NAME.fullmatch(path.name):
                folder = path.parent.relative_to(root).as_posix()
                self._places.append(Place(f"{folder}/data_*{match[2]}", int(match[1])))
        if not self._places:
            raise DataError(
                f"{root}: no data_*.ckpt or data_*.ckpt.gz below it; expected the output directory "
                "of SpecForge's prepare_hidden_states."
            )

    def places(self) -> Iterator[Place]:
        yield from self._places

    def files(self) -> Iterator[tuple[str, int, int]]:
        for place in self._places:
            status = (self.root / place.name).stat()
            yield place.name, status.st_size, status.st_mtime_ns

    def tokens(self, place: Place) -> SourceTokens:
        ids, mask, states, where = self._read(place)
        length = _length_without_padding(ids, mask)
        shape = StoredShape(
            states.shape[1] // self._hidden_size,
            self._hidden_size,
            check_dtype(states.dtype, where),
        )
        return SourceTokens(ids[:length], mask[:length], len(ids) - length, shape)

    def states(self, place: Place) -> tuple[npt.NDArray[np.int64], Tensor]:
        ids, mask, states, _ = self._read(place)
        length = _length_without_padding(ids, mask)
        return ids[:length], states[:length].reshape(length, -1, self._hidden_size)

    def _read(
        self, place: Place
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], Tensor, str]:
        path = self.root / place.name
        record = _load(path)
        where = str(path)
        if not isinstance(record, dict) or not all(
            isinstance(record.get(key), Tensor) for key in _KEYS
        ):
            found = ", ".join(map(str, record)) if isinstance(record, dict) else type(record)
            raise DataError(
                f"{where}: expected a record of tensors {', '.join(_KEYS)}, found {found}. Only "
                "records of the strategies dflash, domino and dspark can be imported."
            )
        states = record["hidden_states"]
        states = states[0] if states.ndim == 3 and len(states) == 1 else states
        if states.ndim != 2 or states.shape[1] % self._hidden_size or not states.shape[1]:
            raise DataError(
                f"{where}: hidden_states has shape {list(record['hidden_states'].shape)}; expected "
                f"[1, tokens, layers x {self._hidden_size}] for this target. Name the target that "
                "the states were captured from."
            )
        ids = record["input_ids"].numpy().reshape(-1).astype(np.int64)
        mask = record["loss_mask"].numpy().reshape(-1).astype(np.int64)
        check_lengths(len(states), len(ids), len(mask), where)
        return ids, check_mask(mask, where), states, where


def _load(path: Path) -> Any:
    """The object in `path`, without its code ever being run. Plain files are mapped, not read.

    Raises:
        SampleSkippedError: the file is damaged.
        DataError: it holds more than tensors.
    """
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                data = io.BytesIO(file.read())
            return torch.load(data, map_location="cpu", weights_only=True)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        if "Weights only load failed" in str(error):
            raise DataError(
                f"{path}: holds more than tensors; loading it would run code from the file. It is "
                "not read. Save the record as a dictionary of tensors."
            ) from None
        raise SampleSkippedError(SkipReason.UNREADABLE, f"{path}: {error}") from None
    except _DAMAGED as error:
        first = str(error).partition("\n")[0]
        raise SampleSkippedError(SkipReason.UNREADABLE, f"{path}: {first}") from None


def _length_without_padding(ids: npt.NDArray[np.int64], mask: npt.NDArray[np.uint8]) -> int:
    """Tokens before the run of id 0 and mask 0 at the end, which is how SpecForge pads.

    A real, unsupervised id 0 at the end goes too: nothing is learned from it or behind it.
    """
    real = np.flatnonzero((ids != 0) | (mask != 0))
    return int(real[-1]) + 1 if len(real) else 0
