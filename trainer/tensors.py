"""Facts about the tensors of a safetensors file, read one tensor at a time."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shared.errors import RunError


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorFacts:
    name: str
    shape: tuple[int, ...]
    dtype: str
    norm: float
    """L2 norm of the finite values."""

    largest: float
    """Largest finite magnitude."""

    num_nan: int
    num_inf: int

    @property
    def num_nonfinite(self) -> int:
        return self.num_nan + self.num_inf

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self) | {"shape": list(self.shape)}


def read_facts(path: Path) -> Iterator[TensorFacts]:
    """Facts of every tensor in `path`, by name; holds no more than one of them in memory.

    Raises:
        RunError: the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                yield _facts(name, file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be read ({error}).") from error


def _facts(name: str, tensor: torch.Tensor) -> TensorFacts:
    finite = tensor.float().nan_to_num(0.0, 0.0, 0.0).flatten()
    return TensorFacts(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        norm=float(torch.linalg.vector_norm(finite, dtype=torch.float64)),
        largest=float(finite.abs().max()) if len(finite) else 0.0,
        num_nan=int(tensor.isnan().sum()),
        num_inf=int(tensor.isinf().sum()),
    )
