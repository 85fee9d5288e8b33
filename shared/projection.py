"""A projection: what a target's tapped states are multiplied with before they are stored.

A drafter reads the tapped blocks only through its fusion layer `fc`. A pilot's `fc`, trained on a
little data, gives the rows of a matrix that keeps what such a layer can see, in a fifth of the
values. The file is written by `trainer projection`, read by `cache-builder build`, and copied into
the cache.

T tokens of one sample   D hidden size   F values of all tapped blocks, side by side   R rank
"""

import json
from dataclasses import dataclass, replace
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional

from shared import config
from shared.errors import CacheError, CacheIncompatibleError, ConfigError
from shared.files import canonical_json
from shared.spec import TargetSpec

FORMAT_VERSION = 1
_DESCRIPTION = "draftcache.projection"
"""The one key of the file's metadata: safetensors writes several in any order, and equal
projections must have equal digests."""

_APPLY_VALUES = 1 << 26
"""Values that are widened to float32 at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Which states a projection is for, and how it was made."""

    kind: Literal["pilot", "principal"]
    """`pilot`: the rows of a trained `fc`, and principal directions where the rank is above the
    hidden size. `principal`: principal directions alone."""

    is_orthonormal: bool
    """Whether the rows are orthogonal, and of one length, once every channel is over its RMS."""

    target_name: str
    """For people."""

    config_sha256: str
    weights_sha256: str
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    rank: int
    step: int | None
    """Optimizer steps of the pilot; None where there was none."""

    fingerprint: str
    """Of the cache that the pilot was trained from, and the statistics were taken of."""

    num_tokens: int
    """Tokens of that cache behind `channel_rms` and the principal directions."""

    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, eq=False, slots=True)
class Projection:
    """A matrix for the states of some blocks of one target."""

    matrix_RF: Tensor
    """float32 [R, F]."""

    start_DR: Tensor
    """float32 [D, R]: where the fusion layer behind the projection starts. The pilot's `fc` is
    `start_DR @ matrix_RF`."""

    channel_rms_F: Tensor
    """float32 [F], positive: root mean square of each channel of the states."""

    provenance: Provenance

    def to(self, device: torch.device | str) -> "Projection":
        """The same with the matrix on `device`, where it is to be applied."""
        return replace(self, matrix_RF=self.matrix_RF.to(device))

    def apply(self, features_TF: Tensor) -> Tensor:
        """Projected states, float32 [T, R]. The sums are float32, whatever the states are."""
        step = max(_APPLY_VALUES // features_TF.shape[1], 1)
        parts = torch.split(features_TF, step)
        return torch.cat([functional.linear(part.float(), self.matrix_RF) for part in parts])

    def rows(self, states_TLD: Tensor) -> Tensor:
        """What is stored of the states of a target, bfloat16 [T, 1, R] or [T, 2, R].

        Args:
            states_TLD: bfloat16, of the blocks, then the last hidden state if it is captured. That
                one is not projected, but has zeros behind it where R is above D.
        """
        num_taps = len(self.provenance.target_layer_ids)
        projected_T1R = self.apply(states_TLD[:, :num_taps].flatten(1)).to(torch.bfloat16)[:, None]
        last_T1D = states_TLD[:, num_taps:]
        missing = projected_T1R.shape[2] - last_T1D.shape[2]
        return torch.cat([projected_T1R, functional.pad(last_T1D, (0, missing))], 1)

    def require_fit(self, target: TargetSpec, layer_ids: tuple[int, ...], where: str) -> None:
        """Refuse states that the projection was not made for.

        Raises:
            CacheIncompatibleError: another target, or other blocks of it.
        """
        made = self.provenance
        asked = {
            "config_sha256": target.config_sha256,
            "weights_sha256": target.weights_sha256,
            "hidden_size": target.hidden_size,
            "target_layer_ids": list(layer_ids),
        }
        lines = config.differences(
            asked, {name: config.to_dict(getattr(made, name)) for name in asked}, ("here", "there")
        )
        if lines:
            raise CacheIncompatibleError(
                f"{where}: made for other states ({'; '.join(lines)}; there it is "
                f"{made.target_name}). Take a pilot of this target with these blocks "
                "(capture.target_layer_ids)."
            )

    def to_bytes(self) -> bytes:
        tensors = {
            "matrix": self.matrix_RF.contiguous(),
            "start": self.start_DR.contiguous(),
            "channel_rms": self.channel_rms_F.contiguous(),
        }
        text = canonical_json(config.to_dict(self.provenance)).decode()
        return bytes(save(tensors, {_DESCRIPTION: text}))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> "Projection":
        """Parse what `to_bytes` wrote.

        Raises:
            CacheError: it is no projection, or one of another version; or a value is not finite.
        """
        made = read_provenance(data[8 : 8 + int.from_bytes(data[:8], "little")], where)
        try:
            tensors = load(data)
        except (SafetensorError, ValueError) as error:
            raise _not_one(where, error) from None
        hidden, features = made.hidden_size, made.hidden_size * len(made.target_layer_ids)
        shapes = {
            "matrix": (made.rank, features),
            "start": (hidden, made.rank),
            "channel_rms": (features,),
        }
        for name in sorted(shapes.keys() | tensors.keys()):
            found = _describe(tensors.get(name))
            expected = f"float32 {list(shapes[name])}" if name in shapes else "nothing"
            if found != expected:
                raise CacheError(f"{where}: tensor {name!r} is {found}, expected {expected}.")
            if not bool(tensors[name].isfinite().all()):
                raise CacheError(
                    f"{where}: tensor {name!r} has values that are not finite. Take another pilot."
                )
        if not bool((tensors["channel_rms"] > 0).all()):
            raise CacheError(f"{where}: tensor 'channel_rms' must be positive.")
        return cls(tensors["matrix"], tensors["start"], tensors["channel_rms"], made)


def read_provenance(header: bytes, where: str) -> Provenance:
    """What the header of a safetensors file, its length left out, says of the projection in it.

    Raises:
        CacheError: it is no projection, or one of another version.
    """
    try:
        fields = json.loads(json.loads(header)["__metadata__"][_DESCRIPTION])
        if (version := fields.get("format_version")) != FORMAT_VERSION:
            raise CacheIncompatibleError(
                f"{where}: a projection of format version {version!r}, this version reads "
                f"{FORMAT_VERSION}. Make it again by `trainer projection`."
            )
        return config.build(Provenance, fields)
    except (ConfigError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _not_one(where, error) from None


def _not_one(where: str, error: Exception) -> CacheError:
    reason = str(error).partition("\n")[0]
    return CacheError(f"{where}: not a projection ({reason}). Make it by `trainer projection`.")


def _describe(tensor: Tensor | None) -> str:
    if tensor is None:
        return "nothing"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
