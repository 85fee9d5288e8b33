"""What is compared: caches, the recipe that all runs share, and what each variant changes in it.

To add an experiment, add its cache (if it needs one of its own), its variants and a group.
"""

from collections.abc import Mapping

from tests.experiments import projections
from tests.experiments.variant import MORE_SEEDS, Cache, Group, Variant, options

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

BASELINE = "lossless"
FLOOR = "zero"
"""The variant that shows what the target's states are worth at all."""


def built(name: str, *settings: str) -> Cache:
    """A cache that `cache-builder build` makes of the demo data."""
    pairs = (f"cache.path={{caches}}/{name}", *settings)
    return Cache(name, ((*BUILD, *options(*pairs)),))


CACHES = {
    cache.name: cache
    for cache in (
        *(built(name, f"codec.preset={name}") for name in ("lossless", "balanced", "small")),
        # A sample a forward: only so does a live forward give the same bits in bfloat16.
        built(
            "alone",
            "codec.preset=lossless",
            "capture.batch_tokens=1",
            'data.sources=[{path = "cache_builder/data/demo.jsonl", limit = 200}]',
        ),
        *projections.CACHES,
    )
}


_ZERO = {"train.zero_features": "true"}
_FEW = {"cache.heldout_fraction": "0.8"}
_SHORT = {"train.steps": "40", "cache.heldout_fraction": "0.1", "evaluate.max_samples": "16"}

VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(BASELINE, "lossless (baseline)", seeds=MORE_SEEDS),
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
        Variant("iid", "independent shuffle", change="iid-order"),
        Variant("runs", "runs of 16", change="runs-order"),
        *projections.VARIANTS,
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
        *projections.GROUPS,
    )
}
"""In the order in which they are run."""
