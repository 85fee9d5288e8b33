"""Are the states what the target gives, and the layers those declared? Asked before any is written.

T tokens of one sample   S stored states per token   L imported blocks   N blocks   D hidden size
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cache_builder.distance import block_distances, is_of_block, nearest_block
from cache_builder.importing.config import CheckConfig, DeclaredConfig
from cache_builder.importing.slots import Slots
from cache_builder.importing.source import Place, StateSource
from cache_builder.plan import Plan
from cache_builder.target import Target
from shared.bar import tracked
from shared.errors import DataError
from shared.quantity import count

_OTHER_NUMBERING = {"hidden-states": ("block", 1), "block": ("hidden-states", -1)}
"""By the numbering declared: the other one, and how its blocks lie to those of this one."""

_CHECKED_TOKENS = 512
"""Of each sample, from its start: with causal attention nothing behind them matters."""


@dataclass(frozen=True, slots=True)
class Check:
    """How far the source's states lie from the target's."""

    num_samples: int
    largest: tuple[float, ...]
    """Per imported block: the largest distance of a sample."""

    def rows(self, target_layer_ids: tuple[int, ...]) -> list[tuple[str, str]]:
        """A table of names and values."""
        return [
            ("run again", f"{count(self.num_samples, 'sample')} by the target"),
            *(
                (f"  block {block}", f"largest difference {100 * distance:.2f} %")
                for block, distance in zip(target_layer_ids, self.largest, strict=True)
            ),
        ]


def check_states(
    source: StateSource,
    plan: Plan,
    slots: Slots,
    target: Target,
    config: CheckConfig,
    declared: DeclaredConfig,
) -> Check:
    """Run random samples of `plan` through `target` and compare with their states in `source`.

    Args:
        target: with taps on all its blocks, in their order.

    Raises:
        DataError: a block differs by more than `config.tolerance`, or another block is clearly
            nearer; it names the file, and the block that the states are of, if any.
        SampleSkippedError: a file cannot be read any more.
    """
    num_samples = min(config.num_samples, len(plan))
    chosen = np.random.default_rng(config.seed).choice(len(plan), num_samples, replace=False)
    distances = []
    for position in tracked(np.sort(chosen).tolist(), "check", "sample", num_samples):
        pattern, number, _ = plan.provenance(position)
        place = Place(pattern, number)
        ids = plan.sample(position).token_ids[:_CHECKED_TOKENS]
        stored_TLD = source.states(place)[1][: len(ids), list(slots.columns)]
        fresh_TND = target.capture([ids])[0].cpu()
        distance_LN = block_distances(stored_TLD, fresh_TND)
        blocks = slots.target_layer_ids
        if not all(
            is_of_block(distance_N, block, config.tolerance)
            for distance_N, block in zip(distance_LN, blocks, strict=True)
        ):
            where = str(source.root / place.name)
            raise DataError(_explain(where, slots, distance_LN, declared, config.tolerance))
        distances.append(distance_LN[range(len(blocks)), list(blocks)])
    largest = torch.stack(distances).amax(0).tolist() if distances else []
    return Check(num_samples, tuple(largest))


def _explain(
    where: str, slots: Slots, distance_LN: Tensor, declared: DeclaredConfig, tolerance: float
) -> str:
    blocks = slots.target_layer_ids
    own = [float(distance_LN[i, block]) for i, block in enumerate(blocks)]
    nearest = [nearest_block(distance_N) for distance_N in distance_LN]
    least = [float(distance_LN[i, block]) for i, block in enumerate(nearest)]
    wrong = [i for i, k in enumerate(blocks) if not is_of_block(distance_LN[i], k, tolerance)]
    worst = max(wrong, key=lambda i: own[i] if own[i] == own[i] else torch.inf)
    message = (
        f"{where}: state {slots.columns[worst]} of each token, declared as the output of block "
        f"{blocks[worst]} (from 0), differs from the target's by {100 * own[worst]:.1f} %"
    )
    if own[worst] <= tolerance:
        message += f", from its block {nearest[worst]} by {100 * least[worst]:.1f} % only. "
    else:
        message += f"; {100 * tolerance:g} % is allowed. "
    if not max(least) <= tolerance:
        return message + (
            f"No block gives it (block {nearest[worst]} comes within {100 * least[worst]:.1f} %): "
            "the target has other weights than the one that was captured, or the states are of "
            "other tokens. If only the numerics are known to differ, raise --tolerance."
        )
    assert declared.layer_numbering is not None
    other, shift = _OTHER_NUMBERING[declared.layer_numbering]
    if all(found == block + shift for found, block in zip(nearest, blocks, strict=True)):
        return message + (
            f"All states are those of the block {'behind' if shift > 0 else 'before'} the declared "
            f"one: the ids are in the other numbering, --layer-numbering {other}."
        )
    return message + (
        f"The states are those of the blocks {', '.join(map(str, nearest))} where "
        f"{', '.join(map(str, blocks))} are declared: correct --layer-ids."
    )
