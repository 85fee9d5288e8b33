"""What is checked and measured of captured states before they are stored.

T tokens of one sample   L captured layers   D hidden size
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.codec import token_blocks
from shared.manifest import LayerStatistics


class LayerSums:
    """Running sums over the tokens of a shard, one entry per layer."""

    def __init__(self, row_sizes: Sequence[int]) -> None:
        """Begin at zero.

        Args:
            row_sizes: values of a token in each layer; what lies behind them are zeros.
        """
        num_layers = len(row_sizes)
        self._row_sizes = tuple(row_sizes)
        self._num_tokens = 0
        self._square_L = torch.zeros(num_layers, dtype=torch.float64)
        self._error_L = torch.zeros(num_layers, dtype=torch.float64)
        self._max_abs_L = torch.zeros(num_layers, dtype=torch.float64)

    def add(self, captured_TLD: Tensor, decoded_TLD: Tensor) -> None:
        """Add one sample as captured and as a reader will decode it."""
        num_tokens, num_layers, size = captured_TLD.shape
        for part in token_blocks(num_tokens, num_layers * size, captured_TLD.device):
            values_TLD = captured_TLD[part].float()
            error_TLD = decoded_TLD[part].float().sub_(values_TLD)
            self._square_L += values_TLD.square().sum((0, 2)).cpu()
            self._error_L += error_TLD.square_().sum((0, 2)).cpu()
            self._max_abs_L = self._max_abs_L.maximum(values_TLD.abs_().amax((0, 2)).double().cpu())
        self._num_tokens += num_tokens

    def statistics(self) -> tuple[LayerStatistics, ...]:
        return tuple(
            LayerStatistics(
                rms=(square / max(self._num_tokens * row_size, 1)) ** 0.5,
                max_abs=max_abs,
                relative_error=(error / square) ** 0.5 if square else 0.0,
            )
            for row_size, square, error, max_abs in zip(
                self._row_sizes,
                self._square_L.tolist(),
                self._error_L.tolist(),
                self._max_abs_L.tolist(),
                strict=True,
            )
        )


def find_fault(hidden_TLD: Tensor, layer_names: tuple[str, ...]) -> str | None:
    """Why these states cannot be used: not finite, all zero, or the same everywhere. Else None."""
    peak_L = hidden_TLD.abs().amax((0, 2)).float()
    for name, peak in zip(layer_names, peak_L.tolist(), strict=True):
        if peak != peak or peak == float("inf"):
            return f"states of {name} are not finite"
        if peak == 0.0:
            return f"states of {name} are all zero"
    # Two tokens that differ are enough, and nearly always there.
    if len(hidden_TLD) > 1 and bool((hidden_TLD[0] == hidden_TLD[1]).all(1).any()):
        constant_L = (hidden_TLD == hidden_TLD[:1]).all(2).all(0)
        for name, is_constant in zip(layer_names, constant_L.tolist(), strict=True):
            if is_constant:
                return f"states of {name} are the same at every token"
    return None
