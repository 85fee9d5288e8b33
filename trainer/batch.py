"""One micro-batch: whole samples side by side in one packed row, and the anchors in them.

S context tokens   L captured layers   D hidden size, or the rank of a projection   A anchors
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shared.codec import Calibration, Packed
from shared.errors import ConfigError
from shared.shard import StoredSample
from trainer.caches import Caches


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """A packed row. States stay as stored (planes of bytes) until the device unpacks them."""

    token_ids_S: Tensor
    """int64."""

    loss_mask_S: Tensor
    """bool: the target produced this token."""

    document_S: Tensor
    """int64: which sample of the row a token belongs to."""

    position_S: Tensor
    """int64: position inside the sample."""

    anchor_A: Tensor
    """int64, ascending: index in the row of each anchor."""

    anchor_valid_A: Tensor
    """bool."""

    packed: Packed
    """States of all S tokens of the row."""

    calibrations: tuple[tuple[str | None, int], ...]
    """Runs of tokens that share a calibration: its name, and the end of the run."""

    sample_ids: tuple[str, ...]
    epoch: int
    bucket: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_S)

    def parts(self, num_anchors: int | None) -> "list[Batch]":
        """The same row with so many of its anchors at a time; None: with all."""
        if num_anchors is None:
            return [self]
        pairs = zip(
            torch.split(self.anchor_A, num_anchors),
            torch.split(self.anchor_valid_A, num_anchors),
            strict=True,
        )
        return [replace(self, anchor_A=a_A, anchor_valid_A=valid_A) for a_A, valid_A in pairs]

    def pin(self) -> "Batch":
        """A copy in page-locked memory: a GPU reads it faster, and nobody has to wait meanwhile."""
        return self._each(Tensor.pin_memory)

    def to(self, device: torch.device) -> "Batch":
        if device.type == "cpu":
            return self
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        packed = self.packed
        return replace(
            self,
            token_ids_S=change(self.token_ids_S),
            loss_mask_S=change(self.loss_mask_S),
            document_S=change(self.document_S),
            position_S=change(self.position_S),
            anchor_A=change(self.anchor_A),
            anchor_valid_A=change(self.anchor_valid_A),
            packed=replace(
                packed,
                planes_PTW=change(packed.planes_PTW),
                outlier_position=change(packed.outlier_position),
                outlier_bits=change(packed.outlier_bits),
            ),
        )


def require_no_mask_token(batch: Batch, mask_token_id: int) -> None:
    """Refuse text that holds the token which stands for what is to be predicted.

    Raises:
        ConfigError: naming the sample.
    """
    found = (batch.token_ids_S == mask_token_id).nonzero()
    if len(found):
        place = int(found[0])
        sample_id = batch.sample_ids[int(batch.document_S[place])]
        raise mask_token_in_text(mask_token_id, sample_id, int(batch.position_S[place]))


def mask_token_in_text(mask_token_id: int, sample_id: str, position: int) -> ConfigError:
    """The error for it, in the same words wherever it is found."""
    return ConfigError(
        f"drafter.mask_token_id {mask_token_id} occurs in the text: sample {sample_id}, position "
        f"{position}. Choose a reserved id of the target that no text contains, or leave the "
        "sample out (cache.exclude), and begin anew (--fresh)."
    )


class Features:
    """Turns the stored states of a batch into bfloat16 on the device where they are used.

    The last hidden state, where the cache has it, is read with the others but is none of the
    features: at inference nobody has it before the token that it predicts is known.
    """

    def __init__(self, cache: Caches, device: torch.device) -> None:
        self._cache = cache
        self._device = device
        self._calibrations: dict[str | None, Calibration | None] = {}
        """Those met so far, on the device."""

    def unpack(self, batch: Batch) -> Tensor:
        """The drafter's features, bfloat16 [S, L, D]: of the tapped blocks alone, or [S, 1, R]
        where a projection made them."""
        return self.split(batch)[0]

    def split(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The features, and the last hidden state, bfloat16 [S, D], if the cache holds it."""
        states_SLD, spec = self._unpack(batch), self._cache.spec
        features_SLD = states_SLD[:, : spec.num_feature_rows]
        if spec.last_hidden == "none":
            return features_SLD, None
        return features_SLD, states_SLD[:, -1, : spec.target.hidden_size]

    def _unpack(self, batch: Batch) -> Tensor:
        packed, parts, begin = batch.packed, [], 0
        for name, end in batch.calibrations:
            calibration = self._calibration(name)
            size = packed.values_per_token
            inside = (packed.outlier_position >= begin * size) & (
                packed.outlier_position < end * size
            )
            part = packed
            if len(batch.calibrations) > 1:
                part = Packed(
                    packed.planes_PTW[:, begin:end],
                    packed.outlier_position[inside] - begin * size,
                    packed.outlier_bits[inside],
                    size,
                )
            parts.append(self._cache.codec.unpack(part, calibration))
            begin = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _calibration(self, name: str | None) -> Calibration | None:
        if name not in self._calibrations:
            found = self._cache.calibration(name)
            self._calibrations[name] = None if found is None else found.to(self._device)
        return self._calibrations[name]


def collate(
    samples: Sequence[StoredSample],
    anchors: Sequence[npt.NDArray[np.int64]],
    *,
    epoch: int,
    bucket: int,
) -> Batch:
    """Pack whole samples into one row; `anchors` are positions inside each sample."""
    lengths = [len(sample.token_ids) for sample in samples]
    starts = np.cumsum([0, *lengths])
    size = samples[0].packed.values_per_token
    calibrations: list[tuple[str | None, int]] = []
    for sample, end in zip(samples, starts[1:].tolist(), strict=True):
        if calibrations and calibrations[-1][0] == sample.calibration:
            calibrations.pop()
        calibrations.append((sample.calibration, end))
    anchor_A = np.concatenate([own + start for own, start in zip(anchors, starts, strict=False)])
    return Batch(
        token_ids_S=_joined([sample.token_ids for sample in samples]).long(),
        loss_mask_S=_joined([sample.loss_mask for sample in samples]).bool(),
        document_S=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)),
        position_S=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
        anchor_A=torch.from_numpy(anchor_A),
        anchor_valid_A=torch.ones(len(anchor_A), dtype=torch.bool),
        packed=Packed(
            torch.cat([sample.packed.planes_PTW for sample in samples], 1),
            torch.cat(
                [
                    sample.packed.outlier_position + int(start) * size
                    for sample, start in zip(samples, starts, strict=False)
                ]
            ),
            torch.cat([sample.packed.outlier_bits for sample in samples]),
            size,
        ),
        calibrations=tuple(calibrations),
        sample_ids=tuple(sample.sample_id for sample in samples),
        epoch=epoch,
        bucket=bucket,
    )


def _joined(arrays: list[npt.NDArray[np.int32]] | list[npt.NDArray[np.uint8]]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))
