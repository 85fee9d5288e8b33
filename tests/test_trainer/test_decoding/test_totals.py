"""The figures of a method, by hand."""

import pytest

from trainer.decoding.decode import Decoded
from trainer.decoding.totals import MethodTotals


def test_figures_of_two_texts() -> None:
    plain, chain = MethodTotals("plain", 3), MethodTotals("chain", 3)
    for length in (8, 2):
        plain.add(Decoded(list(range(length)), [0] * (length - 1), 9.0, 0.5 * (length - 1)))
    # 1 token by the prefill, then 3 + 1, 0 + 1, and 2 that end the text.
    chain.add(Decoded(list(range(8)), [3, 0, 2], 9.0, 1.5))
    # The prefill's, and one that was not drafted.
    chain.add(Decoded([0, 1], [0], 9.0, 0.5))
    found = chain.summary(plain)
    assert found["num_rounds"] == 4
    assert found["tau"] == (4 + 1 + 2 + 1) / 4
    assert found["tokens_per_forward"] == 10 / (4 + 2)
    # Slot 1 was reached in all rounds, slot 2 in all but the last, slot 3 in two.
    assert found["rounds_by_slot"] == [4, 3, 2]
    assert found["accepted_by_slot"] == [2 / 4, 2 / 3, 1 / 2]
    assert found["tokens_per_second"] == pytest.approx(8 / 2.0)
    assert found["speedup"] == pytest.approx((4.0 / 8) / (2.0 / 8))
    assert plain.summary(plain)["tau"] == plain.summary(plain)["speedup"] == 1.0


def test_a_text_of_one_token_has_no_round() -> None:
    plain = MethodTotals("plain", 2)
    plain.add(Decoded([4], [], 1.0, 0.0))
    found = plain.summary(plain)
    assert found["tau"] is found["speedup"] is found["tokens_per_second"] is None
    assert found["tokens_per_forward"] == 1.0
    assert found["accepted_by_slot"] == [None, None]
