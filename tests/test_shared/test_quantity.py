"""Counts have their noun's number, sizes three digits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.quantity import count, duration, size


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "0 samples"), (1, "1 sample"), (2, "2 samples"), (12345, "12,345 samples")],
)
def test_a_count_has_the_number_of_its_noun(number: int, expected: str) -> None:
    assert count(number, "sample") == expected


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (19_500_000_000, "19.5 GB"),
        (35e12, "35.0 TB"),
        (5e18, "5,000 PB"),
    ],
)
def test_a_size_has_three_digits_and_the_right_unit(num_bytes: float, expected: str) -> None:
    assert size(num_bytes) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.4, "0 s"),
        (99.4, "99 s"),
        (99.6, "2 min"),
        (12 * 60, "12 min"),
        (99.6 * 60, "1.7 h"),
        (47.9 * 3600, "47.9 h"),
        (47.96 * 3600, "2.0 days"),
        (1000 * 86400, "1,000.0 days"),
    ],
)
def test_a_duration_has_the_unit_that_suits_it(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


@given(st.integers(0, 10**17))
def test_a_size_is_never_a_thousand_of_a_unit(num_bytes: int) -> None:
    number = size(num_bytes).split()[0]
    assert not number.startswith("1000")
    assert len(number.replace(".", "")) <= 3
