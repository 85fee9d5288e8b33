"""What is compared: caches, the recipe that all runs share, and what each variant changes in it.

To add an experiment, add its cache (if it needs one of its own), its variants and a group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

TRAIN_CONFIG = "trainer/configs/demo.toml"
BUILD = ("cache_builder", "build", "--config", "cache_builder/configs/demo.toml")

RECIPE: Mapping[str, str] = {
    "train.steps": "600",
    "sampler.tokens_per_batch": "512",
    "evaluate.max_samples": "64",
    "evaluate.tree_budgets": "[16, 64, 256]",
    "checkpoint.keep": "1",
    "loader.num_threads": "1",
}
"""What every run sets besides `TRAIN_CONFIG`; a variant's own settings come after it."""

SEEDS = (0, 1, 2)

BASELINE = "lossless"
FLOOR = "zero"
"""The variant that shows what the target's states are worth at all."""


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache of the experiments, and the commands (`python -m ...`) that make it."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    """Run one after the other, each of them resumable. `{caches}` is the directory of all caches,
    so that `{caches}/NAME` is this one and those it needs are beside it."""

    needs: tuple[str, ...] = ()
    """Caches that must be there first."""


def built(name: str, *settings: str) -> Cache:
    """A cache that `cache-builder build` makes of the demo data."""
    pairs = (f"cache.path={{caches}}/{name}", *settings)
    return Cache(name, ((*BUILD, *(word for pair in pairs for word in ("--set", pair))),))


_PROJECTION = "{caches}/projection.safetensors"
_PILOT_CACHE = ("--set", "cache.path={caches}/pilot")
_PILOT_RUN = "{caches}/pilot-run"
PILOT = (
    ("cache_builder", "build", "--config", "cache_builder/configs/demo-pilot.toml", *_PILOT_CACHE),
    (
        *("trainer", "train", "--config", "trainer/configs/demo-pilot.toml", *_PILOT_CACHE),
        *("--set", f"run.path={_PILOT_RUN}"),
    ),
    ("trainer", "projection", _PILOT_RUN, "-o", _PROJECTION),
)
"""The pilot of `make projected`."""


def projected(preset: str) -> Cache:
    """A cache of the demo data behind the pilot's projection."""
    settings = (f"codec.preset={preset}", f"capture.projection={_PROJECTION}")
    return replace(built(f"projected-{preset}", *settings), needs=("projection",))


CACHES = {
    cache.name: cache
    for cache in (
        *(projected(name) for name in ("lossless", "balanced", "small")),
        Cache("projection", PILOT),
        *(built(name, f"codec.preset={name}") for name in ("lossless", "balanced", "small")),
        # A sample a forward: only so does a live forward give the same bits in bfloat16.
        built(
            "alone",
            "codec.preset=lossless",
            "capture.batch_tokens=1",
            'data.sources=[{path = "cache_builder/data/demo.jsonl", limit = 200}]',
        ),
    )
}


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

    seeds: tuple[int, ...] = SEEDS
    keeps_losses: bool = False
    """Keep the training loss and gradient norm of each step in the results."""

    @property
    def caches(self) -> list[str]:
        """All that it needs."""
        return [self.cache, *([self.also] if self.also else [])]


@dataclass(frozen=True, slots=True)
class Group:
    """Variants beside a baseline, in a table and a plot of their own."""

    name: str
    baseline: str
    variants: tuple[str, ...]
    has_one_loss: bool = True
    """Whether the held-out loss weighs the slots in the same way for all of them."""


_ZERO = {"train.zero_features": "true"}
_FEW = {"cache.heldout_fraction": "0.8"}
_SHORT = {"train.steps": "40", "cache.heldout_fraction": "0.1", "evaluate.max_samples": "16"}

VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(BASELINE, "lossless (baseline)"),
        Variant("balanced", "balanced", cache="balanced", also="lossless"),
        Variant("small", "small", cache="small", also="lossless"),
        Variant("stored", "from the cache", _SHORT, "alone", seeds=(0,), keeps_losses=True),
        Variant(
            "live", "from a live forward", _SHORT, "alone", "live", seeds=(0,), keeps_losses=True
        ),
        Variant(FLOOR, "states set to zero", _ZERO),
        Variant("decay-4", "decay, gamma 4", {"loss.kind": "decay", "loss.gamma": "4"}),
        Variant("decay-7", "decay, gamma 7", {"loss.kind": "decay", "loss.gamma": "7"}),
        Variant("few", "noise 0.3, new anchors", _FEW),
        Variant("few-noise-0", "no noise", {**_FEW, "noise.scale": "0"}),
        Variant("few-fixed", "the same anchors", _FEW, change="fixed-anchors"),
        Variant("noise-0", "no noise", {"noise.scale": "0"}),
        *(
            Variant(f"projected-{name}", f"projected, {name}", cache=f"projected-{name}")
            for name in ("lossless", "balanced", "small")
        ),
        Variant("iid", "independent shuffle", change="iid-order"),
        Variant("runs", "runs of 16", change="runs-order"),
    )
}

GROUPS = {
    group.name: group
    for group in (
        Group("codec", BASELINE, ("balanced", "small")),
        Group("live", "stored", ("live",)),
        Group("floor", BASELINE, (FLOOR,)),
        Group("loss", BASELINE, ("decay-4", "decay-7"), has_one_loss=False),
        Group("few", "few", ("few-noise-0", "few-fixed")),
        Group("order", BASELINE, ("iid", "runs")),
        Group("noise", BASELINE, ("noise-0",)),
    )
}
"""In the order in which they are run."""
