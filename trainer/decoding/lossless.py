"""Whether speculative decoding gave the very text of plain greedy decoding."""

from dataclasses import dataclass
from typing import Any

from trainer.decoding.prompts import Prompt
from trainer.decoding.target import Target

TIE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.0625}
"""Logits closer than this count as tied. Plain decoding runs one token a forward, verification
many, and products of other shapes are summed in another order: float32 logits of a real target
then differ by some 1e-5, those of bfloat16 by a few steps of their type, 1/8 at 16 to 32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first token in which a text differs from the plain one."""

    method: str
    prompt: str
    position: int
    """Among the new tokens, from 0."""

    expected: int | None
    """Token of plain decoding; None where that had ended."""

    found: int | None
    """Token of the method; None where that had ended."""

    margin: float | None
    """Logit of the expected token less that of the found one; None where a text had ended."""

    is_tie: bool

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def find_difference(
    target: Target, prompt: Prompt, plain: list[int], other: list[int], method: str, tie: float
) -> Difference | None:
    """The first difference between two texts behind `prompt`; None where they are equal.

    What follows a tie is another text by right, and is not compared.

    Args:
        tie: margin below which a difference counts as one.
    """
    if plain == other:
        return None
    position = next(
        (i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b),
        min(len(plain), len(other)),
    )
    expected = plain[position] if position < len(plain) else None
    found = other[position] if position < len(other) else None
    margin = None
    if expected is not None and found is not None:
        before = prompt.token_ids + plain[:position]
        logits_V = target.forward(before, target.new_cache(), last_only=True).logits_NV[-1].float()
        margin = float(logits_V[expected] - logits_V[found])
    return Difference(
        method=method,
        prompt=prompt.place,
        position=position,
        expected=expected,
        found=found,
        margin=margin,
        is_tie=margin is not None and abs(margin) < tie,
    )
