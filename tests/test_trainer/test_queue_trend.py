"""The queue's slope and time to empty, against lines whose answer is known."""

import math

import pytest

from trainer.queue_trend import WINDOW_STEPS, QueueTrend


def trend(*points: tuple[float, int]) -> QueueTrend:
    made = QueueTrend()
    for seconds, depth in points:
        made.add(seconds, depth)
    return made


def test_a_falling_queue_says_when_it_will_be_empty() -> None:
    falling = trend(*((100.0 + 2 * step, 50 - step) for step in range(20)))
    assert falling.slope == pytest.approx(-0.5)
    assert falling.seconds_to_empty == pytest.approx(31 / 0.5)


def test_a_steady_or_rising_queue_is_never_empty() -> None:
    assert trend((0.0, 8), (1.0, 8), (2.0, 8)).slope == 0
    for points in [((0.0, 8), (1.0, 8)), ((0.0, 1), (1.0, 8))]:
        assert math.isnan(trend(*points).seconds_to_empty)


def test_a_steady_queue_has_no_slope_at_all_whatever_the_times() -> None:
    """Rounding gave it -7e-14, and a time to empty of millions of years."""
    steady = trend(*((1234.5 + 0.7 * step + 0.013 * (step % 7), 8) for step in range(40)))
    assert steady.slope == 0
    assert math.isnan(steady.seconds_to_empty)


def test_noise_around_a_level_has_nearly_no_slope() -> None:
    noisy = trend(*((float(step), 8 + (-1) ** step) for step in range(60)))
    assert abs(noisy.slope) < 0.01


def test_one_step_has_no_slope() -> None:
    assert math.isnan(trend((1.0, 8)).slope)
    assert math.isnan(trend((1.0, 8)).seconds_to_empty)
    assert math.isnan(trend((1.0, 8), (1.0, 3)).slope)


def test_old_steps_are_forgotten() -> None:
    rising = [(float(step), step) for step in range(WINDOW_STEPS)]
    falling = [(float(WINDOW_STEPS + step), 100 - step) for step in range(WINDOW_STEPS)]
    assert trend(*rising, *falling).slope == pytest.approx(-1)
