"""Which blocks of a target are captured, where nobody says."""

from shared.errors import TargetError


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
