"""What an experiment is made of: caches, variants of the recipe, and groups that are compared."""

from collections.abc import Mapping
from dataclasses import dataclass, field

SEEDS = (0, 1, 2)
MORE_SEEDS = (*SEEDS, 3, 4, 5)
"""Where a decision hangs on a small difference."""


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache of the experiments, and the commands (`python -m ...`) that make it."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    """Run one after the other, each of them resumable. `{caches}` is the directory of all caches,
    so that `{caches}/NAME` is this one and those it needs are beside it."""

    needs: tuple[str, ...] = ()
    """Caches that must be there first."""


@dataclass(frozen=True, eq=False, slots=True)
class Variant:
    name: str
    title: str
    settings: Mapping[str, str] = field(default_factory=dict)
    cache: str = "lossless"
    change: str | None = None
    """One of `changes.CHANGES`: what no setting of the product does."""

    also: str | None = None
    """Another cache, of the same samples, on whose states the drafter is asked as well."""

    needs: tuple[str, ...] = ()
    """More caches (or what is made like them) that must be there."""

    seeds: tuple[int, ...] = SEEDS
    keeps_losses: bool = False
    """Keep the training loss and gradient norm of each step in the results."""

    @property
    def caches(self) -> list[str]:
        """All that it needs."""
        return [self.cache, *([self.also] if self.also else []), *self.needs]


@dataclass(frozen=True, slots=True)
class Group:
    """Variants beside a baseline, in a table and a plot of their own."""

    name: str
    baseline: str
    variants: tuple[str, ...]
    has_one_loss: bool = True
    """Whether the held-out loss weighs the slots in the same way for all of them."""

    has_bytes: bool = False
    """Whether the table says what a token takes in their caches."""


def options(*pairs: str) -> tuple[str, ...]:
    """Options of a command that set these, each `section.key=value`."""
    return tuple(word for pair in pairs for word in ("--set", pair))
