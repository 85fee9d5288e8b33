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
from torch.nn.functional import rms_norm

from shared import config
from shared.errors import CacheError, ConfigError
from shared.files import canonical_json
from shared.spec import CaptureSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Readout:
    """How the target makes logits of its last hidden state, besides the product with the LM head.

    logits = soft_cap * tanh(scale / soft_cap * (LM head @ state)), without a cap just
    scale * (LM head @ state). A state from before the final norm is normed first:
    (norm_offset + final_norm) * state / sqrt(mean(state ** 2) + norm_eps).
    """

    scale: float
    soft_cap: float | None
    norm_eps: float | None
    """None: the stored state is past the final norm already."""

    norm_offset: float
    """1 where the norm's weight is stored as its distance from 1 (Gemma, Qwen3.5), else 0."""

    def __post_init__(self) -> None:
        for name in ("scale", "soft_cap", "norm_eps"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value:g}")
        if self.norm_offset not in (0.0, 1.0):
            raise ValueError(f"norm_offset must be 0 or 1, got {self.norm_offset:g}")


@dataclass(frozen=True, eq=False, slots=True)
class Head:
    """Embedding, LM head and final norm of the target."""

    embedding_VD: Tensor
    """bfloat16 as stored, [V, D]: the plain rows, without the multiplier that some models apply."""

    lm_head_VD: Tensor
    """As the embedding; the same tensor as the embedding where the target ties them."""

    final_norm_D: Tensor
    """As the embedding, [D]: weight of the norm before the LM head."""

    readout: Readout | None = None
    """None where the cache holds no last hidden state to make logits of."""

    @property
    def is_tied(self) -> bool:
        return self.embedding_VD.data_ptr() == self.lm_head_VD.data_ptr()

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> "Head":
        embedding = self.embedding_VD.to(device, dtype)
        lm_head = embedding if self.is_tied else self.lm_head_VD.to(device, dtype)
        return Head(embedding, lm_head, self.final_norm_D.to(device, dtype), self.readout)

    def logits(self, last_hidden_ND: Tensor) -> Tensor:
        """The target's own logits, [N, V] in the type of the LM head, of stored last states."""
        readout = self.readout
        assert readout is not None
        if readout.norm_eps is not None:
            last_hidden_ND = rms_norm(
                last_hidden_ND.float(),
                self.final_norm_D.shape,
                readout.norm_offset + self.final_norm_D.float(),
                readout.norm_eps,
            )
        logits_NV = last_hidden_ND.to(self.lm_head_VD.dtype) @ self.lm_head_VD.T
        if readout.scale != 1.0:
            logits_NV.mul_(readout.scale)
        if readout.soft_cap is not None:
            logits_NV.div_(readout.soft_cap).tanh_().mul_(readout.soft_cap)
        return logits_NV

    def to_bytes(self) -> bytes:
        tensors = {"embedding": self.embedding_VD.contiguous(), "final_norm": self.final_norm_D}
        if not self.is_tied:
            tensors["lm_head"] = self.lm_head_VD.contiguous()
        if self.readout is not None:
            # No metadata: safetensors writes two of them in any order, and equal heads must have
            # equal digests.
            text = bytearray(canonical_json(config.to_dict(self.readout)))
            tensors["readout"] = torch.frombuffer(text, dtype=torch.uint8)
        return bytes(save(tensors, {"tied": str(self.is_tied).lower()}))

    @classmethod
    def from_bytes(cls, data: bytes, spec: CaptureSpec, where: str) -> "Head":
        """Parse what `to_bytes` wrote and check it against `spec`.

        Raises:
            CacheError: a tensor is missing, or of another shape or type; or the readout does not
                go with what is stored.
        """
        try:
            tensors = load(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise CacheError(f"{where}: not a safetensors file ({error}).") from None
        readout = _parse_readout(tensors.pop("readout", None), spec, where)
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
        return cls(embedding, tensors.get("lm_head", embedding), tensors["final_norm"], readout)


def _parse_readout(stored: Tensor | None, spec: CaptureSpec, where: str) -> Readout | None:
    readout = None
    try:
        if stored is not None:
            readout = config.build(Readout, json.loads(stored.numpy().tobytes()))
    except (ConfigError, ValueError, TypeError, RecursionError) as error:
        raise CacheError(f"{where}: its readout is damaged ({error}).") from None
    is_prenorm = readout is not None and readout.norm_eps is not None
    expected = spec.last_hidden != "none", spec.last_hidden == "pre_norm"
    if (readout is not None, is_prenorm) != expected:
        raise CacheError(
            f"{where}: its readout is {readout}, which does not go with the spec's last_hidden "
            f"{spec.last_hidden!r}. The file is of another cache."
        )
    return readout
