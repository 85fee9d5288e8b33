"""Reading a drafter directory in z-lab's layout: a published one, or an earlier export."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from shared.errors import RunError
from shared.files import read_json, sha256_bytes, sha256_file

_WEIGHTS = "*.safetensors"
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Each goes into float32, in which drafters are trained, without a loss."""


def read_config(path: Path, where: str) -> dict[str, Any]:
    """The drafter's `config.json`.

    Args:
        where: names the place in messages.

    Raises:
        RunError: there is none.
    """
    if not (path / "config.json").is_file():
        raise RunError(
            f"{where}: no drafter here (config.json is missing). Give a directory in z-lab's "
            "layout, as `trainer export` writes it."
        )
    config: dict[str, Any] = read_json(path / "config.json")
    return config


def read_weights(path: Path, where: str) -> tuple[dict[str, Tensor], str]:
    """All tensors, as stored, and a digest: of the file, or of the digests of several files.

    Raises:
        RunError: there are none, or they cannot be read.
    """
    files = sorted(path.glob(_WEIGHTS))
    if not files:
        raise RunError(
            f"{where}: no {_WEIGHTS} here. Pickled weights are not read: convert them to "
            "safetensors."
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


def require_tensors(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Refuse tensors that are not exactly those of `shapes`, of finite floats.

    Raises:
        RunError: naming what is wrong.
    """
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
        raise RunError(f"{where}: its tensors are {'; '.join(wrong[:4])}{more}.")
