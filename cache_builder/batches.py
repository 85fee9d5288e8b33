"""Answers in batches of conversations, for a generator on this machine."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

from cache_builder.exchange import Exchange
from cache_builder.generation import Answer, Sampling

_WINDOW_BATCHES = 16
"""Batches that are sorted by length together: less padding, and results not long in coming."""


class Generator(Protocol):
    """Answers prompts given as ids."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Answer]: ...


class Batches:
    """Conversations through a generator, `size` at once."""

    def __init__(self, generator: Generator, size: int) -> None:
        self._generator = generator
        self._size = size

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._generator.eos_ids

    def answer(self, exchanges: Iterator[Exchange], sampling: Sampling) -> Iterator[list[Exchange]]:
        """The conversations answered to their end, a batch at a time, those of like length
        together. No more of `exchanges` is taken than is sorted together.
        """
        while window := list(islice(exchanges, self._size * _WINDOW_BATCHES)):
            window.sort(key=lambda exchange: len(exchange.prompt_ids))
            for first in range(0, len(window), self._size):
                batch = window[first : first + self._size]
                while still_open := [exchange for exchange in batch if exchange.is_open]:
                    prompts = [exchange.prompt_ids for exchange in still_open]
                    made = self._generator.generate(prompts, sampling)
                    for exchange, answer in zip(still_open, made, strict=True):
                        exchange.add(answer)
                yield batch
