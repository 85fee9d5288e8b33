"""The head of a target, taken from its modules: what a drafter shares with it, or why it cannot.

V rows of the vocabulary   D hidden size
"""

from typing import Any

import torch
from torch import Tensor, nn

from shared.decoder import Decoder
from shared.errors import TargetError
from shared.head import Head

_PLAIN = (torch.bfloat16, torch.float16, torch.float32)


def read_head(decoder: Decoder, name: str, config: Any) -> Head:
    """Embedding, LM head and final norm, as bfloat16 on the CPU.

    A norm without a weight has ones. The bias of a LayerNorm is not part of the head: only a last
    hidden state of before the norm would need it, which is refused where the readout is found.

    Args:
        name: of the model, for messages.
        config: of the text part of the target.

    Raises:
        TargetError: a drafter cannot work with its embedding and LM head alone.
    """
    vocab, hidden = int(config.vocab_size), int(config.hidden_size)
    embedding = _weight(decoder.embedding, f"{name}: its token embedding", (vocab, hidden))
    bias = getattr(decoder.lm_head, "bias", None)
    if isinstance(bias, Tensor):
        raise TargetError(
            f"{name}: its LM head has a bias. A drafter is trained with the rows of the LM head "
            "alone and would be served with the bias. Take another target."
        )
    lm_head = embedding
    if getattr(decoder.lm_head, "weight", None) is not decoder.embedding.weight:
        lm_head = _weight(decoder.lm_head, f"{name}: its LM head", (vocab, hidden))
    if any(True for _ in decoder.final_norm.parameters()):
        norm = _weight(decoder.final_norm, f"{name}: its final norm", (hidden,))
    else:
        norm = torch.ones(hidden, dtype=torch.bfloat16)
    return Head(embedding, lm_head, norm)


def _weight(module: nn.Module, what: str, shape: tuple[int, ...]) -> Tensor:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dtype not in _PLAIN:
        found = weight.dtype if isinstance(weight, Tensor) else "none"
        raise TargetError(
            f"{what} ({type(module).__name__}) has no plain weight (found {found}); a drafter "
            "needs it. Take a checkpoint that does not quantize it."
        )
    if tuple(weight.shape) != shape:
        raise TargetError(
            f"{what} is {list(weight.shape)}, expected {list(shape)} by its config (vocab_size, "
            "hidden_size). A drafter works in the target's hidden size with the ids of its "
            "vocabulary: take another target."
        )
    return weight.detach().to("cpu", torch.bfloat16, copy=True)
