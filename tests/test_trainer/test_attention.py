"""The visibility rule by hand, and every form of it against the plain table."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from trainer.attention import attend, build_mask
from trainer.flex import compiled_flex_attention, cut_blocks
from trainer.shapes import fill, round_steps
from trainer.spans import Predicate, visible_spans
from trainer.tiles import TiledMask, cut_tiles

pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile"  # eager on purpose: tiny and on CPU
)

Row = tuple[Tensor, Tensor, Tensor, int]


def block_visibility(row: Row, window: int | None = None) -> Predicate:
    return visible_spans(*row, window).predicate()


def table(row: Row, window: int | None = None) -> Tensor:
    """The rule as torch expands it, bool [Q, T]."""
    document_S, anchor_A, _, block_size = row
    num_queries = len(anchor_A) * block_size
    num_keys = len(document_S) + num_queries
    visible = block_visibility(row, window)
    return create_mask(visible, None, None, num_queries, num_keys, "cpu")[0, 0]


def expand(mask: TiledMask, num_context: int, num_queries: int) -> Tensor:
    """The table that tiles stand for."""
    visible_QT = torch.zeros(num_queries, num_context + num_queries, dtype=torch.bool)
    for index, tile in enumerate(mask.tiles):
        first = index * mask.tile_queries
        queries = slice(first, first + len(tile.visible_QT))
        width = tile.context.stop - tile.context.start
        visible_QT[queries, tile.context] = tile.visible_QT[:, :width]
        own = slice(num_context + queries.start, num_context + queries.stop)
        visible_QT[queries, own] = tile.visible_QT[:, width:]
    return visible_QT


def in_words(row: Row, window: int | None = None) -> Tensor:
    """The rule a second time, as loops."""
    document_S, anchor_A, valid_A, block_size = row
    num_context, num_queries = len(document_S), len(anchor_A) * block_size
    visible_QT = torch.zeros(num_queries, num_context + num_queries, dtype=torch.bool)
    for q in range(num_queries):
        anchor = int(anchor_A[q // block_size])
        for s in range(anchor if valid_A[q // block_size] else 0):
            visible_QT[q, s] = document_S[s] == document_S[anchor]
        block = q // block_size * block_size
        visible_QT[q, num_context + block : num_context + block + block_size] = True
        if window is not None:  # the last `window` positions up to the slot's own
            first = anchor + q - block - window + 1
            visible_QT[q, : max(first, 0)] = False
            visible_QT[q, num_context + q + 1 :] = False
            visible_QT[q, num_context : max(num_context + q - window + 1, num_context)] = False
    return visible_QT


def random_row(seed: int, lengths: list[int], padding: int, num_anchors: int, block: int) -> Row:
    """Documents and unsorted anchors, the last one invalid."""
    generator = torch.Generator().manual_seed(seed)
    documents = [d for d, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
    anchor_A = torch.randint(sum(lengths), (num_anchors,), generator=generator)
    valid_A = torch.arange(num_anchors) < max(num_anchors - 1, 1)
    return torch.tensor(documents), anchor_A, valid_A, block


def random_qkv(row: Row, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    num_queries = len(row[1]) * row[3]
    num_keys = len(row[0]) + num_queries
    shapes = [(6, num_queries, 8), (2, num_keys, 8), (2, num_keys, 8)]
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes
    )
    return q, k, v


def test_rule_is_the_table_written_by_hand() -> None:
    row: Row = (
        torch.tensor([0, 0, 0, 0, 0, 1, 1, -1]),
        torch.tensor([2, 3, 6, 4]),  # two that overlap, one elsewhere, one that only pads
        torch.tensor([True, True, True, False]),
        2,
    )
    expected = """
        11000 00 0  11 00 00 00
        11000 00 0  11 00 00 00
        11100 00 0  00 11 00 00
        11100 00 0  00 11 00 00
        00000 10 0  00 00 11 00
        00000 10 0  00 00 11 00
        00000 00 0  00 00 00 11
        00000 00 0  00 00 00 11
    """
    lines = [line.replace(" ", "") for line in expected.split("\n") if line.strip()]
    assert ["".join(str(int(x)) for x in line) for line in table(row).tolist()] == lines
    mask = build_mask(*row)
    assert isinstance(mask, TiledMask)
    assert torch.equal(expand(mask, 8, 8), table(row))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 99),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    padding=st.integers(0, 3),
    num_anchors=st.integers(1, 5),
    block=st.integers(2, 4),
    blocks_per_tile=st.integers(1, 3),
    window=st.one_of(st.none(), st.integers(1, 8)),
)
def test_predicate_and_tiles_say_what_the_words_say(
    seed: int,
    lengths: list[int],
    padding: int,
    num_anchors: int,
    block: int,
    blocks_per_tile: int,
    window: int | None,
) -> None:
    row = random_row(seed, lengths, padding, num_anchors, block)
    num_context, num_queries = len(row[0]), num_anchors * block
    visible = block_visibility(row, window)
    tiles = cut_tiles(visible, num_context, num_queries, blocks_per_tile * block)
    assert torch.equal(table(row, window), in_words(row, window))
    assert torch.equal(expand(tiles, num_context, num_queries), in_words(row, window))


def test_a_window_of_three_is_the_table_written_by_hand() -> None:
    row: Row = (torch.tensor([0, 0, 0, 0, 1]), torch.tensor([3, 1]), torch.ones(2).bool(), 3)
    expected = """
        0110 0  100 000
        0010 0  110 000
        0000 0  111 000
        1000 0  000 100
        1000 0  000 110
        0000 0  000 111
    """
    lines = [line.replace(" ", "") for line in expected.split("\n") if line.strip()]
    assert ["".join(str(int(x)) for x in line) for line in table(row, 3).tolist()] == lines


def test_tiles_touch_little_more_than_the_document_they_need() -> None:
    row: Row = (
        torch.arange(3).repeat_interleave(100),
        torch.arange(10, 300, 10),
        torch.ones(29, dtype=torch.bool),
        16,
    )
    mask = build_mask(*row)
    assert isinstance(mask, TiledMask)
    assert mask.tile_queries == 128
    assert [(tile.context.start, tile.context.stop) for tile in mask.tiles] == [
        (0, 128),
        (0, 192),
        (64, 256),
        (192, 300),
    ]
    assert all(tile.visible_QT.any(dim=1).all() for tile in mask.tiles)


def test_tiles_give_the_values_and_gradients_of_the_dense_table() -> None:
    row = random_row(3, [9, 4, 7], 2, 7, 4)
    tiles = cut_tiles(block_visibility(row), 22, 28, 8)
    results = []
    for mask in (table(row), tiles):
        qkv = random_qkv(row, torch.float64)
        out_NQH = attend(*qkv, mask)
        out_NQH.square().sum().backward()
        results.append([out_NQH, *(x.grad for x in qkv)])
    for dense, tiled in zip(*results, strict=True):
        assert dense.abs().sum() > 0
        torch.testing.assert_close(tiled, dense, rtol=0, atol=1e-12)


def test_gradients_of_tiles_in_bfloat16_are_as_good_as_those_of_the_dense_table() -> None:
    row = random_row(3, [90, 40, 70], 2, 12, 16)
    tiles = cut_tiles(block_visibility(row), 202, 192, 64)

    def gradients(mask: Tensor | TiledMask, dtype: torch.dtype) -> list[Tensor]:
        qkv = [x.detach().bfloat16().to(dtype).requires_grad_() for x in random_qkv(row, dtype)]
        out_NQH = attend(*qkv, mask)
        toward_NQH = torch.randn(out_NQH.shape, generator=torch.Generator().manual_seed(1))
        out_NQH.backward(toward_NQH.bfloat16().to(dtype))
        return [x.grad.double() for x in qkv if x.grad is not None]

    exact = gradients(table(row), torch.float64)
    dense, tiled = (gradients(mask, torch.bfloat16) for mask in (table(row), tiles))
    for truth, of_dense, of_tiles in zip(exact, dense, tiled, strict=True):
        error, usual = ((own - truth).norm() / truth.norm() for own in (of_tiles, of_dense))
        assert error < max(2 * usual, 0.01)


def listed(mask: BlockMask) -> list[list[list[int]]]:
    """Columns of the blocks of each row, in the order in which the kernels walk through them."""
    pairs = [
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
        (mask.q_num_blocks, mask.q_indices),
        (mask.full_q_num_blocks, mask.full_q_indices),
    ]
    rows = []
    for count, index in pairs:
        assert count is not None
        assert index is not None
        assert (count.dtype, index.dtype) == (torch.int32, torch.int32)
        of_rows = zip(count[0, 0].tolist(), index[0, 0].tolist(), strict=True)
        rows.append([columns[:number] for number, columns in of_rows])
    return rows


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 99),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    padding=st.integers(0, 9),
    num_anchors=st.integers(1, 9),
    block=st.integers(2, 5),
    size=st.integers(1, 8),
    window=st.one_of(st.none(), st.integers(1, 20)),
)
def test_blocks_are_those_that_torch_finds_by_asking_every_pair(
    seed: int,
    lengths: list[int],
    padding: int,
    num_anchors: int,
    block: int,
    size: int,
    window: int | None,
) -> None:
    row = random_row(seed, lengths, padding, num_anchors, block)
    found = cut_blocks(visible_spans(*row, window), size)
    sizes = (num_anchors * block, len(row[0]) + num_anchors * block)
    visible = block_visibility(row, window)
    expected = create_block_mask(visible, None, None, *sizes, "cpu", BLOCK_SIZE=size)
    assert listed(found) == listed(expected)
    assert found.shape == expected.shape
    assert found.BLOCK_SIZE == expected.BLOCK_SIZE


def test_flex_attention_gives_the_values_of_the_dense_table() -> None:
    row = random_row(5, [90, 40, 70], 2, 27, 10)
    q, k, v = (x.detach() for x in random_qkv(row, torch.float32))  # no backward on CPU
    for window in (None, 24):
        mask = cut_blocks(visible_spans(*row, window))
        torch.testing.assert_close(attend(q, k, v, mask), attend(q, k, v, table(row, window)))


@pytest.mark.slow
def test_flex_attention_is_compiled_once_whatever_the_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond eight times torch would go on with a form that holds all scores."""
    count = CompileCounterWithBackend("eager")
    run = compiled_flex_attention.__wrapped__(count)
    steps = round_steps(torch.device("cuda"), 16)
    for seed, (num_context, num_anchors, window) in enumerate(
        [(700, 90, None), (128, 1, None), (300, 33, 64), (50, 70, None), (512, 32, 2048)]
    ):
        document_S, anchor_A, valid_A, block = random_row(seed, [num_context], 0, num_anchors, 16)
        row = (fill(document_S, steps[0], -1), fill(anchor_A, steps[1]), fill(valid_A, steps[1]))
        q, k, v = (x.detach() for x in random_qkv((*row, block), torch.float32))
        mask = cut_blocks(visible_spans(*row, block, window))
        out = run(q[None], k[None], v[None], block_mask=mask, enable_gqa=True)[0]
        torch.testing.assert_close(out, attend(q, k, v, table((*row, block), window)))
    assert count.frame_count == 1


def test_padding_has_finite_output_and_gradient() -> None:
    row: Row = (torch.tensor([0, 0, -1]), torch.tensor([0, 0]), torch.tensor([True, False]), 2)
    q, k, v = random_qkv(row, torch.float32)
    attend(q, k, v, build_mask(*row)).sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.isfinite().all()


def test_row_without_anchors_is_refused() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="at least one anchor"):
        build_mask(torch.zeros(4, dtype=torch.int64), nothing, nothing.bool(), 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("default")  # of the compiler, on what it could do better
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-2), (torch.bfloat16, 5e-2)])
def test_block_mask_on_cuda_gives_the_values_and_gradients_of_the_dense_table(
    window: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    row = random_row(7, [200, 90, 150], 72, 24, 16)
    mask = build_mask(*(x.cuda() for x in row[:3]), row[3], window)
    assert isinstance(mask, BlockMask)
    results = []
    for form in (table(row, window).cuda(), mask):
        generator = torch.Generator("cuda").manual_seed(0)
        q, k, v = (
            torch.randn(shape, generator=generator, device="cuda", dtype=dtype).requires_grad_()
            for shape in [(6, 384, 64), (2, 896, 64), (2, 896, 64)]
        )
        out_NQH = attend(q, k, v, form)
        out_NQH.float().square().sum().backward()
        results.append([out_NQH, q.grad, k.grad, v.grad])
    for dense, block in zip(*results, strict=True):
        assert (block - dense).norm() < tolerance * dense.norm()
