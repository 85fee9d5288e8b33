"""First weights from a drafter in z-lab's layout: a published one, or an earlier export."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from shared import config as configs
from shared.errors import RunError
from shared.files import read_json, sha256_bytes, sha256_file
from trainer.exporting.zlab import dflash_config, dflash_shapes, drafter_of
from trainer.session import Session, read_target_config

logger = logging.getLogger(__name__)

_WEIGHTS = "*.safetensors"
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Each goes into float32, in which drafters are trained, without a loss."""

_OF_TARGET = ("hidden_size", "vocab_size", "num_target_layers")
_FREE = ("initializer_range", "fitted_start", "partial_rotary_factor")
"""Settings of a drafter that make no other one of it."""


@dataclass(frozen=True, eq=False, slots=True)
class WarmStart:
    """Weights that fit the drafter of a session."""

    path: Path
    weights_sha256: str
    """Of the file; of the files' digests where there are several."""

    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, session: Session) -> "WarmStart | None":
        """The drafter at `train.init_from`; None where that is not set.

        Raises:
            RunError: there is none, or it is another drafter than is asked for: names what differs.
        """
        path = session.config.train.init_from
        if path is None:
            return None
        if not (path / "config.json").is_file():
            raise RunError(
                f"train.init_from {path}: no drafter here (config.json is missing). Give a "
                "directory in z-lab's layout, as `trainer export` writes it."
            )
        _require_same_drafter(read_json(path / "config.json"), session, path)
        tensors, digest = _read_weights(path)
        _require_shapes(tensors, session, path)
        return cls(path, digest, tensors)

    def load(self, session: Session) -> None:
        """Put the weights into the session's drafter, bit for bit."""
        session.drafter.load_state_dict({name: t.float() for name, t in self.tensors.items()})
        logger.info(
            "the weights start from %s (sha256 %s); drafter.fitted_start does not apply",
            self.path,
            self.weights_sha256[:16],
        )

    def describe(self) -> dict[str, Any]:
        """What a checkpoint remembers."""
        return {"path": str(self.path), "weights_sha256": self.weights_sha256}


def _require_same_drafter(config: dict[str, Any], session: Session, path: Path) -> None:
    where = f"train.init_from {path}"
    ours = dflash_config(session.config.drafter, session.cache, read_target_config(session.cache))
    lines = configs.differences(
        _settings(ours, where), _settings(config, where), ("asked for", "there")
    )
    if lines:
        raise RunError(
            f"{where}: another drafter than is asked for ({'; '.join(lines)}). Give its settings, "
            "and a cache of its target with its layers; or start without it."
        )


def _settings(config: dict[str, Any], where: str) -> dict[str, Any]:
    """What must be equal: of the drafter, its taps, and the sizes of its target."""
    drafter = configs.to_dict(drafter_of(config, where))
    return {
        **{f"drafter.{name}": drafter[name] for name in drafter if name not in _FREE},
        "target_layer_ids": (config.get("dflash_config") or {}).get(
            "target_layer_ids", config.get("target_layer_ids")
        ),
        **{name: config.get(name) for name in _OF_TARGET},
    }


def _read_weights(path: Path) -> tuple[dict[str, Tensor], str]:
    files = sorted(path.glob(_WEIGHTS))
    if not files:
        raise RunError(
            f"train.init_from {path}: no {_WEIGHTS} here. Pickled weights are not read: convert "
            "them to safetensors."
        )
    tensors: dict[str, Tensor] = {}
    try:
        for file in files:
            found = load_file(file)
            if twice := sorted(found.keys() & tensors.keys()):
                raise RunError(f"{file}: tensor {twice[0]!r} is in another file of {path} too.")
            tensors |= found
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: its weights cannot be read ({error}).") from error
    digests = [sha256_file(file) for file in files]
    return tensors, digests[0] if len(digests) == 1 else sha256_bytes("".join(digests).encode())


def _require_shapes(tensors: dict[str, Tensor], session: Session, path: Path) -> None:
    config = dflash_config(session.config.drafter, session.cache, {})
    shapes = dflash_shapes(config)
    wrong = []
    for name in sorted(shapes.keys() | tensors.keys()):
        expected = list(shapes[name]) if name in shapes else "nothing"
        found = list(tensors[name].shape) if name in tensors else "nothing"
        if found != expected:
            wrong.append(f"{name} {found}, expected {expected}")
        elif tensors[name].dtype not in _TYPES:
            wrong.append(f"{name} {tensors[name].dtype}, expected a float of 16 or 32 bits")
        elif not bool(tensors[name].isfinite().all()):
            wrong.append(f"{name} with values that are not finite")
    if wrong:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise RunError(f"train.init_from {path}: its tensors are {'; '.join(wrong[:4])}{more}.")
