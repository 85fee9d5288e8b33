"""Reads back what an export wrote: tensors, config and forward. No loader would notice a fault."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from shared.errors import RunError
from shared.projection import Projection
from trainer.attention import build_mask
from trainer.drafter import Drafter
from trainer.exporting.readings import CONSUMERS, GAIN_DIGITS, Reading, Rope
from trainer.exporting.zlab import drafter_of
from trainer.recipe import DrafterConfig

MODEL = "model.safetensors"
_MAX_DIFFERENCE = 1e-6
"""Of the largest value, in float64. Forwards of one drafter differ there by less than 1e-12, in
whatever order a CPU adds up. In float32, with which this began, rounding alone moved the blocks of
demo drafters by up to 1.5e-5 of it, and once by 1e-4: random blocks are louder than text, and what
nearly cancels in them is a large part of the next norm. Another config gives far more."""

_MAX_ROUNDING = 0.02
"""Of the largest value: what rounding `fc` to bfloat16 may change. Measured: 0.003 and 0.005 of
the fused features, 0.002 and 0.004 of the last hidden state (tiny target, demo)."""

_NUM_CONTEXT = 48
_DTYPES = {"d2t": torch.int64, "t2d": torch.bool}


def check_tensors(
    directory: Path, shapes: dict[str, tuple[int, ...]], trained: dict[str, Tensor]
) -> None:
    """Exact keys, shapes, types and bits.

    Raises:
        RunError: naming the tensor.
    """
    tensors = load_file(directory / MODEL)
    for name in sorted(shapes.keys() | tensors.keys() | trained.keys()):
        if name not in shapes or name not in tensors or name not in trained:
            raise RunError(f"{directory}: tensor {name!r} is missing or not of the layout.")
        tensor, dtype = tensors[name], _DTYPES.get(name, torch.bfloat16)
        if tuple(tensor.shape) != shapes[name] or tensor.dtype != dtype:
            raise RunError(
                f"{directory}: tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, expected "
                f"{dtype} {list(shapes[name])}."
            )
        if not torch.equal(_bits(tensor), _bits(trained[name])):
            raise RunError(f"{directory}: tensor {name!r} differs from the trained one.")
        if not bool(tensor.isfinite().all()):
            raise RunError(f"{directory}: tensor {name!r} has values that are not finite.")


def check_readings(
    config: dict[str, Any],
    form: str,
    drafter: DrafterConfig,
    target_layer_ids: tuple[int, ...],
    where: str,
) -> None:
    """Every consumer of the format `form` reads from `config` the drafter that was trained.

    Raises:
        RunError: naming the consumer, and what it would take for what.
    """
    expected = asdict(
        Reading(
            target_layer_ids=target_layer_ids,
            mask_token_id=drafter.mask_token_id,
            block_size=drafter.block_size,
            layers=tuple((drafter.sliding_window if s else None, s) for s in drafter.slides),
            rope=_rope(drafter),
        )
    )
    for consumer, read in CONSUMERS[form].items():
        found = asdict(read(config))
        wrong = [f"{k} {found[k]}, trained {expected[k]}" for k in found if found[k] != expected[k]]
        if wrong:
            raise RunError(f"{where}: {consumer} would read another drafter: {'; '.join(wrong)}.")


@torch.no_grad()
def check_forward(directory: Path, config: dict[str, Any], trained: Drafter) -> None:
    """The directory's own config and tensors compute what `trained` does, on random blocks.

    Args:
        config: of the directory, in z-lab's words.
        trained: with the weights that were written.

    Raises:
        RunError: they differ by more than a millionth of the largest value.
    """
    hidden_size = int(config["hidden_size"])
    num_taps = len(config["dflash_config"]["target_layer_ids"])
    settings = drafter_of(config, str(directory))
    reloaded = Drafter(settings, hidden_size, num_taps * hidden_size)
    tensors = load_file(directory / MODEL)
    reloaded.load_state_dict({name: tensors[name].float() for name in reloaded.state_dict()})
    features_SF = _random(_NUM_CONTEXT, trained.fc.in_features)
    expected_QD = _forward(trained, features_SF)
    difference = _difference(_forward(reloaded, features_SF), expected_QD)
    if not difference <= _MAX_DIFFERENCE:  # nor NaN
        raise RunError(
            f"{directory}: reloaded, it computes something else than the trained drafter: largest "
            f"difference {difference:g} of the largest value."
        )


@torch.no_grad()
def check_product(directory: Path, factored: Drafter, projection: Projection) -> None:
    """The tensors of the directory compute of a target's states what `factored`, with the factor
    that was trained, computes of their projection: but for the rounding of `fc` to bfloat16.

    Raises:
        RunError: they differ by more than a fiftieth of the largest value.
    """
    tensors = load_file(directory / MODEL)
    hidden_size, num_features = tensors["fc.weight"].shape
    whole = Drafter(factored.config, hidden_size, num_features)
    whole.load_state_dict({name: tensors[name].float() for name in whole.state_dict()})
    features_SF = _random(_NUM_CONTEXT, num_features) * projection.channel_rms_F
    projected_SR = projection.apply(features_SF)
    # The fused features too: little of them shows behind a drafter that has hardly learned.
    for compute in (_fused, _forward):
        difference = _difference(compute(whole, features_SF), compute(factored, projected_SR))
        if not difference <= _MAX_ROUNDING:  # nor NaN
            raise RunError(
                f"{directory}: of the states it computes something else than the trained drafter "
                f"of their projection: largest difference {difference:g} of the largest value, at "
                f"most {_MAX_ROUNDING:g} is rounding."
            )


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _fused(drafter: Drafter, features_SF: Tensor) -> Tensor:
    """What the layers read of the target: the context after `fc` and its norm, on the CPU."""
    fused_SD: Tensor = drafter.hidden_norm(drafter.fc(features_SF.to(drafter.fc.weight.device)))
    return fused_SD.cpu()


def _forward(drafter: Drafter, features_SF: Tensor) -> Tensor:
    """Final hidden states of three blocks of random embeddings in that context, in float64."""
    block_size, weight = drafter.config.block_size, drafter.fc.weight
    device, dtype = weight.device, weight.dtype
    generator = torch.Generator().manual_seed(0)
    anchor_A = torch.tensor([1, _NUM_CONTEXT // 2, _NUM_CONTEXT - 1])
    position_S = torch.arange(_NUM_CONTEXT)
    position_Q = (anchor_A[:, None] + torch.arange(block_size)).flatten()
    block_QD = torch.randn(len(position_Q), drafter.fc.out_features, generator=generator)
    row = (torch.zeros_like(position_S), anchor_A, torch.ones_like(anchor_A).bool())
    drafter.cpu().double()
    hidden_QD: Tensor = drafter(
        features_SF.double(),
        block_QD.double(),
        position_S,
        position_Q,
        build_mask(*row, block_size),
        build_mask(*row, block_size, drafter.config.sliding_window),
    )
    drafter.to(device, dtype)
    return hidden_QD


def _rope(drafter: DrafterConfig) -> Rope:
    rope = {"rope_theta": drafter.rope_theta, "rope_type": "default"}
    if (scaling := drafter.rope_scaling) is not None:
        rope |= scaling.parameters()
        if scaling.rope_type == "yarn":
            rope["attention_factor"] = round(scaling.gain, GAIN_DIGITS)
    return rope


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
