"""A run's state at one step, copied to host memory and put back, bit for bit."""

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shared.errors import RunError
from shared.files import canonical_json

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Snapshot:
    """All that a run needs to go on as if it had never stopped. Shares no memory with it."""

    step: int
    """Optimizer steps done."""

    batch_position: int
    """Position of the next micro-batch in the sampler's stream."""

    drafter: dict[str, Tensor]
    """The state dict, on the host, without the prefixes of `torch.compile`."""

    optimizer: dict[str, Tensor]
    """Per parameter `exp_avg.<name>`, `exp_avg_sq.<name>` and `step.<name>`, on the host."""

    config: dict[str, Any]
    cache: dict[str, Any]
    """Fingerprint and generation of the cache trained from."""

    state: dict[str, Any]
    """Whatever else the loop must remember. JSON-able."""

    score: float | None = None
    """Held-out figure of these very weights, higher is better: rotation keeps the best."""


def take_snapshot(
    *,
    step: int,
    batch_position: int,
    drafter: nn.Module,
    optimizer: torch.optim.AdamW,
    config: dict[str, Any],
    cache: dict[str, Any],
    state: dict[str, Any] | None = None,
    score: float | None = None,
) -> Snapshot:
    """Copy the run's state to host memory; training may go on as soon as this returns.

    A non-finite `score` counts as none.

    Raises:
        TypeError, ValueError: `config`, `cache` or `state` is not JSON-able or holds NaN.
    """
    moments: dict[str, Tensor] = {}
    for name, parameter in _named_parameters(optimizer):
        # A parameter without a gradient so far has no state yet, which AdamW reads as zeros.
        held = optimizer.state.get(parameter) or {
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
            "step": torch.tensor(0.0),
        }
        moments |= {f"{moment}.{name}": held[moment] for moment in _MOMENTS}
    return Snapshot(
        step=step,
        batch_position=batch_position,
        drafter=_to_host({_plain(key): value for key, value in drafter.state_dict().items()}),
        optimizer=_to_host(moments),
        config=json_copy(config),
        cache=json_copy(cache),
        state=json_copy(state or {}),
        score=score if score is not None and math.isfinite(score) else None,
    )


def restore(
    snapshot: Snapshot, drafter: nn.Module, optimizer: torch.optim.AdamW | None = None
) -> None:
    """Put the snapshot's tensors into `drafter` and `optimizer`, bit for bit.

    Nothing is changed unless all fits. Learning rate and other settings stay as they are: they
    come from the configuration and the step.

    Raises:
        RunError: a tensor is missing, unknown, or of another shape or dtype.
    """
    keys = {_plain(key): key for key in drafter.state_dict()}
    _require_same(
        "drafter",
        snapshot.step,
        expected={_plain(key): value for key, value in drafter.state_dict().items()},
        found=snapshot.drafter,
    )
    drafter_state = {keys[name]: value for name, value in snapshot.drafter.items()}
    if optimizer is None:
        drafter.load_state_dict(drafter_state)
        return

    named = _named_parameters(optimizer)
    _require_same(
        "optimizer",
        snapshot.step,
        expected={
            f"{moment}.{name}": torch.tensor(0.0) if moment == "step" else parameter
            for name, parameter in named
            for moment in _MOMENTS
        },
        found=snapshot.optimizer,
    )
    drafter.load_state_dict(drafter_state)
    # Clones, because load_state_dict keeps a tensor that is on the right device already.
    moments = {
        index: {moment: snapshot.optimizer[f"{moment}.{name}"].clone() for moment in _MOMENTS}
        for index, (name, _) in enumerate(named)
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})


def _plain(name: str) -> str:
    """`name` without the prefixes that `torch.compile` puts around a module."""
    return name.replace("_orig_mod.", "")


def _named_parameters(optimizer: torch.optim.AdamW) -> list[tuple[str, Tensor]]:
    """Plain name and parameter, in the order of the optimizer's own state dict."""
    return [
        (_plain(name), parameter)
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    ]


def _to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory; from CUDA through pinned memory, waited for once."""
    copies = {
        name: torch.empty_like(
            tensor, device="cpu", pin_memory=tensor.is_cuda, memory_format=torch.contiguous_format
        ).copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        for name, tensor in tensors.items()
    }
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return copies


def json_copy(value: Any) -> Any:
    """What reading `value` back from JSON will give."""
    return json.loads(canonical_json(value))


def _require_same(
    what: str, step: int, *, expected: dict[str, Tensor], found: dict[str, Tensor]
) -> None:
    def described(tensors: dict[str, Tensor], name: str) -> str:
        if name not in tensors:
            return "nothing"
        return f"{str(tensors[name].dtype).removeprefix('torch.')}{list(tensors[name].shape)}"

    problems = [
        f"{name} (expected {described(expected, name)}, found {described(found, name)})"
        for name in sorted(expected.keys() | found.keys())
        if described(expected, name) != described(found, name)
    ]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise RunError(
            f"checkpoint of step {step}: the {what} does not fit this configuration: "
            f"{', '.join(problems[:8])}{more}. Resume with the configuration that wrote it."
        )
