"""The drafter's layers, compiled: what comes before the attention and what comes after it.

Norms, rotary embedding and SwiGLU are then a few kernels instead of some dozens, which all read
and write whole activations. The attention stays as it is: `trainer.flex` compiles its own on a
GPU. Every layer runs the same two graphs, for any numbers of tokens and blocks.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import torch

from shared.errors import RunError
from trainer.drafter import Drafter, Layer

_MAX_GRAPHS = 32
"""Of one function. There is one for the first layer, whose input needs no gradient, and one for
the others; each again without gradients, and where a row has as many slots as context tokens."""


def compile_layers_(drafter: Drafter, backend: str = "inductor") -> None:
    """Compile the layers of `drafter` when they first run. Its parameters keep their names.

    As whole graphs: torch would otherwise go on without a word, uncompiled, where it cannot.
    """
    from torch._dynamo import config  # takes a second, which other runs do not need

    config.recompile_limit = _MAX_GRAPHS
    before, after = (
        torch.compile(function, dynamic=True, fullgraph=True, backend=backend)
        for function in (Layer.before, Layer.after)
    )
    for layer in drafter.layers:
        layer.before = MethodType(before, layer)  # type: ignore[assignment]  # an attribute
        layer.after = MethodType(after, layer)  # type: ignore[assignment]


@contextmanager
def compiler_errors(where: str) -> Iterator[None]:
    """Raise RunError, with the place and what to do, for what torch's compiler raises."""
    try:
        yield
    except RuntimeError as error:
        dynamo = sys.modules.get("torch._dynamo.exc")
        if dynamo is None or not isinstance(error, dynamo.TorchDynamoException):
            raise
        reason = str(error).strip().splitlines()[0][:200]
        raise RunError(
            f"{where}: torch's compiler failed ({reason}). On a GPU it needs Triton and a C "
            "compiler, on a CPU a C++ compiler. train.compile = false does without it; the "
            "attention of a GPU does not."
        ) from error
