"""The frozen tensors of the target that a drafter is trained against: embedding and LM head.

Stage one writes them once to `head.safetensors`; stage two never loads the target.

V rows of the vocabulary   D hidden size
"""

import json
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from shared.errors import CacheError
from shared.spec import CaptureSpec


@dataclass(frozen=True, eq=False, slots=True)
class Head:
    """Embedding, LM head and final norm of the target."""

    embedding_VD: Tensor
    """bfloat16 as stored, [V, D]: the plain rows, without the multiplier that some models apply."""

    lm_head_VD: Tensor
    """As the embedding; the same tensor as the embedding where the target ties them."""

    final_norm_D: Tensor
    """As the embedding, [D]: weight of the norm before the LM head."""

    @property
    def is_tied(self) -> bool:
        return self.embedding_VD.data_ptr() == self.lm_head_VD.data_ptr()

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> "Head":
        embedding = self.embedding_VD.to(device, dtype)
        lm_head = embedding if self.is_tied else self.lm_head_VD.to(device, dtype)
        return Head(embedding, lm_head, self.final_norm_D.to(device, dtype))

    def to_bytes(self) -> bytes:
        tensors = {"embedding": self.embedding_VD.contiguous(), "final_norm": self.final_norm_D}
        if not self.is_tied:
            tensors["lm_head"] = self.lm_head_VD.contiguous()
        return bytes(save(tensors, {"tied": str(self.is_tied).lower()}))

    @classmethod
    def from_bytes(cls, data: bytes, spec: CaptureSpec, where: str) -> "Head":
        """Parse what `to_bytes` wrote and check it against `spec`.

        Raises:
            CacheError: a tensor is missing, or of another shape or type.
        """
        try:
            tensors = load(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise CacheError(f"{where}: not a safetensors file ({error}).") from None
        vocab, hidden = spec.target.vocab_size, spec.target.hidden_size
        shapes = {"embedding": (vocab, hidden), "lm_head": (vocab, hidden), "final_norm": (hidden,)}
        for name in ("embedding", "final_norm"):
            if name not in tensors:
                raise CacheError(f"{where}: tensor {name!r} is missing.")
        for name, tensor in tensors.items():
            if name not in shapes or tensor.shape != shapes[name]:
                raise CacheError(
                    f"{where}: tensor {name!r} has shape {list(tensor.shape)}, "
                    f"expected {list(shapes.get(name, ()))}."
                )
            if tensor.dtype != torch.bfloat16:
                raise CacheError(f"{where}: tensor {name!r} is {tensor.dtype}, expected bfloat16.")
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        tied = (header.get("__metadata__") or {}).get("tied")
        if tied != str("lm_head" not in tensors).lower():
            raise CacheError(
                f"{where}: it says tied = {tied!r}, its tensors are {', '.join(sorted(tensors))}."
            )
        embedding = tensors["embedding"]
        return cls(embedding, tensors.get("lm_head", embedding), tensors["final_norm"])
