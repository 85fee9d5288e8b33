"""Ranges of settings: outside of them a run could not start, or could not mean what it says."""

from typing import Any

COUNT = 2**31 - 1
"""The largest count: also what int32 holds."""


def require_range(config: Any, names: str, low: float, high: float = COUNT) -> None:
    """Refuse a field of `config` outside [low, high]; `names` are divided by spaces.

    A tuple is checked item by item, and None is nothing to check.

    Raises:
        ValueError: naming the field, the range and what was given.
    """
    for name in names.split():
        given = getattr(config, name)
        for value in given if isinstance(given, tuple) else (given,):
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {value}")


def require_text(config: Any, names: str) -> None:
    """Refuse a text or path of `config` that is empty or holds a zero byte; None passes.

    Raises:
        ValueError: naming the field.
    """
    for name in names.split():
        given = getattr(config, name)
        for text in map(str, given if isinstance(given, tuple) else (given,)):
            if given is not None and (not text.strip() or "\0" in text):
                raise ValueError(f"{name} must not be empty or hold a zero byte, got {text!r}")
