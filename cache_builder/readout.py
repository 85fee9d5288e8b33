"""How a target makes logits of its last hidden state: found out, and proven on a text.

What the head has (LM head, weight of the final norm) is not all that a target does: some cap or
scale their logits, some add a bias, and a norm has a constant and may store its weight as the
distance from 1. A teacher's distribution is right only if all of that is known.

N tokens   D hidden size   V vocabulary
"""

from typing import Any

import torch
from torch import Tensor, nn

from shared.errors import TargetError
from shared.head import Head, Readout
from shared.spec import LastHidden

TOLERANCE = 0.02
"""Relative L2 by which logits may differ: the head is bfloat16, whatever the target is."""

_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_SCALES = (
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "output_multiplier",
    "logits_mup_width_multiplier",
)
"""Fields of configs. One name divides in one model and multiplies in the next."""


def find_readout(
    head: Head,
    config: Any,
    final_norm: nn.Module,
    last_hidden: LastHidden,
    state_ND: Tensor,
    logits_NV: Tensor,
) -> Readout:
    """The readout by which `head` makes `logits_NV`, the target's own, of `state_ND`, its states.

    Args:
        config: of the text part of the target.

    Raises:
        TargetError: no known one gives these logits, or the final norm cannot be rebuilt.
    """
    eps, offset = None, 0.0
    if last_hidden == "pre_norm":
        eps, offset = _rebuild_norm(final_norm, head.final_norm_D, state_ND)
    cap = _declared(config, _CAPS)[:1]
    factors = _declared(config, _SCALES)
    found = [
        Readout(scale=scale, soft_cap=cap[0] if cap else None, norm_eps=eps, norm_offset=offset)
        for scale in [*factors, *(1 / factor for factor in factors), 1.0]
    ]
    expected_NV = logits_NV.cpu().float()
    distances = [
        _distance(
            Head(head.embedding_VD, head.lm_head_VD, head.final_norm_D, readout).logits(state_ND),
            expected_NV,
        )
        for readout in found
    ]
    best = min(range(len(found)), key=distances.__getitem__)
    if not distances[best] <= TOLERANCE:  # a NaN is refused too
        raise TargetError(
            f"capture.last_hidden: the target's logits are not what its LM head gives of its last "
            f"hidden state (they differ by {100 * distances[best]:.1f} %, at most "
            f"{100 * TOLERANCE:.0f} % is rounding): it does something to them that is not known "
            "here. Set capture.last_hidden = 'none'."
        )
    return found[best]


def _rebuild_norm(norm: nn.Module, weight_D: Tensor, state_ND: Tensor) -> tuple[float, float]:
    """Constant and offset with which the norm's weight alone gives what the norm gives."""
    eps = next((e for n in ("variance_epsilon", "eps") if (e := getattr(norm, n, None))), None)
    name = type(norm).__name__
    if eps is not None:
        device = next((weight.device for weight in norm.parameters()), state_ND.device)
        expected_ND = norm(state_ND.to(device)).cpu().float()
        unit_ND = torch.nn.functional.rms_norm(state_ND.float(), weight_D.shape, eps=eps)
        for offset in (0.0, 1.0):
            if _distance((offset + weight_D.float()) * unit_ND, expected_ND) <= TOLERANCE:
                return float(eps), offset
    raise TargetError(
        f"capture.last_hidden 'pre_norm': the final norm ({name}) is no RMS norm that its weight "
        "describes, so that nobody could apply it later. Set capture.last_hidden = 'post_norm'."
    )


def _declared(config: Any, names: tuple[str, ...]) -> list[float]:
    values = [getattr(config, name, None) for name in names]
    return [float(value) for value in values if isinstance(value, int | float) and value > 0]


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm().clamp_min(1e-30))
