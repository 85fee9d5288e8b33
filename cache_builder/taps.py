"""Which blocks of a target are captured, where nobody says; and which are better not."""

import logging
from collections.abc import Sequence

from shared.errors import TargetError

logger = logging.getLogger(__name__)


def default_layer_ids(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Taps from the second to the third-to-last block, evenly spaced.

    Source: z-lab/dflash 44947fb, build_target_layer_ids: round(1 + i (N - 4) / (n - 1)).

    Raises:
        TargetError: the target is too shallow for that many distinct taps.
    """
    if num_taps == 1:
        return (num_layers // 2,)
    possible = range(min(num_taps, num_layers + 1))
    ids = tuple(round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in possible)
    if len(set(ids)) != num_taps or ids[0] < 0 or list(ids) != sorted(ids):
        raise TargetError(
            f"a target of {num_layers} blocks has no {num_taps} distinct default taps. "
            "Set capture.target_layer_ids or a smaller capture.num_layers."
        )
    return ids


def warn_of_last_block(layer_ids: Sequence[int], num_layers: int) -> None:
    """What is captured of the last block is not what a drafter is given where it is served."""
    if num_layers - 1 in layer_ids:
        logger.warning(
            "capture.target_layer_ids: block %d is the target's last. z-lab's client gives a "
            "drafter its state behind the final norm, not before it as it is captured, and SGLang "
            "what the next block is given, of which there is none. Choose a block before it.",
            num_layers - 1,
        )
