"""Which anchors are drawn, and the blocks built from them."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainer.anchors import Blocks, build_blocks, draw_anchors, legal_anchors

MASK = 99
Bools = npt.NDArray[np.bool_]


def draw(
    loss_mask: Bools, limit: int, seed: int = 0, epoch: int = 0, sample_id: str = "a"
) -> list[int]:
    anchors = draw_anchors(loss_mask, seed=seed, epoch=epoch, sample_id=sample_id, limit=limit)
    return [int(anchor) for anchor in anchors]


def build(
    anchors: list[int],
    *,
    length: int = 10,
    block_size: int = 4,
    loss_mask: list[int] | None = None,
    document: list[int] | None = None,
    first_position: int = 0,
    valid: list[bool] | None = None,
) -> Blocks:
    """Blocks of a row that counts: the token at index s is s."""
    return build_blocks(
        token_ids_S=torch.arange(length, dtype=torch.int32),
        loss_mask_S=torch.tensor(loss_mask or [1] * length, dtype=torch.uint8),
        document_S=torch.tensor(document or [0] * length),
        position_S=torch.arange(first_position, first_position + length, dtype=torch.int32),
        anchor_A=torch.tensor(anchors),
        anchor_valid_A=torch.tensor(valid or [True] * len(anchors)),
        block_size=block_size,
        mask_token_id=MASK,
    )


def rows(x: Tensor) -> list[list[int]]:
    return x.int().tolist()


def test_the_target_predicts_a_slots_token_from_the_state_of_the_one_before_it() -> None:
    blocks = build([1, 4], block_size=3, document=[0, 0, 0, 1, 1, 1, 1, 1, 1, 1])
    assert blocks.supervised_AK.tolist() == [[False, True, False], [False, True, True]]
    assert blocks.state_AK[blocks.supervised_AK].tolist() == [1, 4, 5]
    assert blocks.label_AK[blocks.supervised_AK].tolist() == [2, 5, 6]


def test_anchor_needs_itself_and_its_successor_supervised() -> None:
    loss_mask = np.array([0, 1, 1, 1, 0, 1, 0, 0, 1, 1], dtype=bool)
    assert legal_anchors(loss_mask).tolist() == [1, 2, 8]
    assert legal_anchors(loss_mask.astype(np.uint8)).tolist() == [1, 2, 8]


@pytest.mark.parametrize(
    "loss_mask",
    [
        pytest.param([], id="no_token"),
        pytest.param([1], id="one_token"),
        pytest.param([0, 0, 0, 0], id="prompt_only"),
        pytest.param([0, 1, 0, 1], id="never_two_in_a_row"),
        pytest.param([0, 0, 0, 1], id="last_token_only"),
    ],
)
def test_sample_without_a_legal_anchor_draws_none(loss_mask: list[int]) -> None:
    anchors = draw_anchors(np.array(loss_mask, dtype=bool), seed=0, epoch=0, sample_id="a", limit=4)
    assert anchors.dtype == np.int64
    assert anchors.shape == (0,)


@pytest.mark.parametrize("num_supervised", [1, 3, 4, 5])  # 1, K - 1, K, K + 1 of K = 4
def test_short_endings_keep_every_label_they_have(num_supervised: int) -> None:
    loss_mask = [0] * (10 - num_supervised) + [1] * num_supervised
    anchors = draw(np.array(loss_mask, dtype=bool), limit=99)
    assert anchors == list(range(10 - num_supervised, 9))
    if anchors:
        supervised_AK = build(anchors, loss_mask=loss_mask).supervised_AK
        assert supervised_AK.sum(dim=1).tolist() == [min(9 - a, 3) for a in anchors]


@given(
    loss_mask=st.lists(st.booleans(), max_size=40).map(lambda bits: np.array(bits, dtype=bool)),
    limit=st.integers(1, 20),
    epoch=st.integers(0, 5),
)
def test_draw_is_an_ascending_subset_as_large_as_possible(
    loss_mask: Bools, limit: int, epoch: int
) -> None:
    legal = legal_anchors(loss_mask).tolist()
    anchors = draw(loss_mask, limit, epoch=epoch)
    assert anchors == sorted(set(anchors))
    assert set(anchors) <= set(legal)
    assert len(anchors) == min(limit, len(legal))


def test_draw_depends_on_its_key_and_on_nothing_else() -> None:
    loss_mask = np.ones(500, dtype=bool)
    keys = [
        (seed, epoch, sample_id)
        for seed in (0, 1)
        for epoch in (0, 1, 11)
        for sample_id in ("a", "b", "1/a")
    ]
    first = [draw(loss_mask, 20, *key) for key in keys]
    np.random.default_rng(0).random(7)
    again = [draw(loss_mask, 20, *key) for key in reversed(keys)]
    assert first == again[::-1]
    assert len({tuple(anchors) for anchors in first}) == len(keys)


def test_draw_is_the_same_in_every_release() -> None:
    loss_mask = np.ones(1000, dtype=bool)
    assert draw(loss_mask, 5, seed=7, epoch=3, sample_id="golden") == [359, 378, 649, 901, 998]


def test_every_legal_anchor_is_equally_likely() -> None:
    loss_mask = np.ones(11, dtype=bool)
    counts = np.zeros(10)
    for epoch in range(2000):
        counts[draw(loss_mask, 3, epoch=epoch)] += 1
    assert np.abs(counts - 600).max() < 5 * np.sqrt(2000 * 0.3 * 0.7)


def test_slot_k_predicts_the_token_at_its_own_position() -> None:
    blocks = build([2, 5], first_position=100)
    assert rows(blocks.input_id_AK) == [[2, MASK, MASK, MASK], [5, MASK, MASK, MASK]]
    assert rows(blocks.label_AK) == [[0, 3, 4, 5], [0, 6, 7, 8]]
    assert rows(blocks.supervised_AK) == [[0, 1, 1, 1], [0, 1, 1, 1]]
    assert rows(blocks.position_AK) == [[102, 103, 104, 105], [105, 106, 107, 108]]
    assert blocks.input_id_AK.dtype == blocks.label_AK.dtype == torch.int64
    assert blocks.position_AK.dtype == torch.int64
    assert blocks.supervised_AK.dtype == torch.bool


def test_last_legal_anchor_has_one_label() -> None:
    blocks = build([8])
    assert rows(blocks.label_AK) == [[0, 9, 0, 0]]
    assert rows(blocks.supervised_AK) == [[0, 1, 0, 0]]
    assert rows(blocks.position_AK) == [[8, 9, 10, 11]]


def test_labels_end_with_the_document_though_the_next_one_is_supervised() -> None:
    blocks = build([3, 5], document=[0] * 5 + [1] * 3 + [-1] * 2)
    assert rows(blocks.supervised_AK) == [[0, 1, 0, 0], [0, 1, 1, 0]]
    assert rows(blocks.label_AK) == [[0, 4, 0, 0], [0, 6, 7, 0]]


def test_tokens_outside_the_loss_mask_are_not_labels() -> None:
    blocks = build([1], loss_mask=[0, 1, 1, 0, 1, 1, 1, 1, 1, 1])
    assert rows(blocks.supervised_AK) == [[0, 1, 0, 1]]
    assert rows(blocks.label_AK) == [[0, 2, 0, 4]]


def test_invalid_anchor_supervises_nothing() -> None:
    blocks = build([2, 0], valid=[True, False])
    assert rows(blocks.supervised_AK) == [[0, 1, 1, 1], [0, 0, 0, 0]]
    assert rows(blocks.label_AK)[1] == [0, 0, 0, 0]
