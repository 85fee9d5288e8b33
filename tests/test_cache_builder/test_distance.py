"""Which block states are of: neither the whole nor a tolerance tells where neighbours are near."""

import torch

from cache_builder.distance import NOISE, block_distances, is_of_block, nearest_block


def test_the_distance_is_that_of_the_whole_or_of_the_median_token() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 1.0], [1.0, 0.0]])[:, None]  # norms 5, 1, 1
    one_token = expected.clone()
    one_token[0, 0, 0] += 3.0  # 9 of 27 in all; the median token is exact
    torch.testing.assert_close(
        block_distances(one_token, expected), torch.tensor([[(9 / 27) ** 0.5]]).double()
    )
    two_tokens = expected.clone()
    two_tokens[1:] *= 1.5  # 0.5 of 27 in all; half of the median token
    torch.testing.assert_close(
        block_distances(two_tokens, expected), torch.tensor([[0.5]]).double()
    )
    two_tokens[0] = torch.nan
    assert block_distances(two_tokens, expected).isnan().all()


def test_every_layer_is_compared_with_every_block() -> None:
    blocks = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(0))
    distances = block_distances(blocks[:, [2, 0]].bfloat16(), blocks)
    assert distances.shape == (2, 4)
    assert [nearest_block(row) for row in distances] == [2, 0]
    assert (distances < 0.01).nonzero().tolist() == [[0, 2], [1, 0]]


def test_a_block_within_the_tolerance_is_not_enough_if_another_is_clearly_nearer() -> None:
    near = torch.tensor([0.030, 0.012, 0.040])
    assert not is_of_block(near, 0, NOISE)
    assert is_of_block(near, 1, NOISE)
    assert is_of_block(torch.tensor([0.012, 0.011]), 0, NOISE)  # both are as near: either may be
    assert is_of_block(torch.tensor([0.0, 0.0]), 1, NOISE)
    assert not is_of_block(torch.tensor([0.2, 0.9]), 0, NOISE)
    assert is_of_block(torch.tensor([0.01, torch.nan]), 0, NOISE)
    assert not is_of_block(torch.tensor([torch.nan, torch.nan]), 0, NOISE)
