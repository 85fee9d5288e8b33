"""The model card of an exported drafter: README.md of its directory."""

import json
import re
from dataclasses import dataclass
from typing import Any

from shared import config as configs
from trainer.caches import Caches
from trainer.index import Split
from trainer.recipe import DrafterConfig
from trainer.session import Session

_RECIPE = ("drafter", "anchors", "loss", "optimizer", "noise", "sampler", "train")
_NOT_LEARNED = ("train.device", "train.init_from")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_NOT_REDUCED = (
    "Measured with the whole vocabulary: a token that the draft vocabulary leaves out ends a "
    "block, so that served lengths are below these."
)
_TITLES = {"dflash": "z-lab's layout", "speculators": "the speculators format"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a card tells besides the session."""

    form: str
    target: str
    """Hub id or path of the target."""

    step: int
    evaluations: list[dict[str, Any]]
    init_from: dict[str, Any] | None
    """Drafter that the weights started from, with the digest of its weights."""

    draft_vocabulary: str | None = None
    """What a reduced vocabulary covers."""


def is_hub_id(name: str) -> bool:
    """Whether `name` can be one of a repository on the hub, and not only a path."""
    return _HUB_ID.fullmatch(name) is not None


def model_card(session: Session, facts: Facts) -> str:
    """Markdown with a YAML head, the same bytes for the same run."""
    config, cache = session.config, session.cache
    drafter, spec = config.drafter, cache.spec
    revision = cache.parts[0].description["target_revision"]
    arguments = json.dumps(spec.tokens.template_arguments, sort_keys=True)
    origin = facts.init_from
    rows = [
        ("target", facts.target + (f", revision {revision}" if revision else "")),
        ("", f"{spec.target.model_type}, weights sha256 {spec.target.weights_sha256[:16]}"),
        ("target blocks tapped", f"{list(spec.target_layer_ids)} (0-based, output of the block)"),
        ("draft layers", f"{drafter.num_layers}{_windows(drafter)}"),
        ("block size", f"{drafter.block_size}, {drafter.block_size - 1} drafted tokens"),
        ("mask token id", str(drafter.mask_token_id)),
        ("trained", f"{facts.step} steps, seed {config.train.seed}, {config.loss.kind} loss"),
        ("cache fingerprint", spec.fingerprint),
        ("chat template", f"sha256 {spec.tokens.template_sha256[:16]}, arguments {arguments}"),
    ]
    if spec.projection is not None:
        trained = f"from states projected {spec.projection}; fc is their product"
        rows.append(("features", trained))
    if facts.draft_vocabulary is not None:
        rows.append(("draft vocabulary", facts.draft_vocabulary))
    if origin is not None:
        digest = origin["weights_sha256"][:16]
        rows.append(("started from", f"{origin['path']}, weights sha256 {digest}"))
    return "\n".join(
        [
            *_head(facts),
            "",
            "# DFlash drafter",
            "",
            f"A block-diffusion drafter for speculative decoding, in {_TITLES[facts.form]}. It "
            "drafts for its target only, which verifies every token.",
            "",
            *_table(("", ""), rows),
            "",
            "## Acceptance",
            "",
            *_acceptance(facts),
            "",
            "## Serving",
            "",
            *_serving(drafter, facts),
            *(["", f"Blocks tapped: {note}."] if (note := last_block(cache)) is not None else []),
            "",
            "## Data",
            "",
            *_data(cache, session.split),
            "",
            "## Recipe",
            "",
            *_table(("setting", "value"), _recipe(configs.to_dict(config))),
            "",
            "## Publishing",
            "",
            "Set `license` in the head of this file, then, in this directory:",
            "",
            "```sh",
            "hf upload USER/NAME .",
            "```",
            "",
        ]
    )


def last_block(cache: Caches) -> str | None:
    """What is to be known of a drafter that taps the last block of its target; None if it does not.

    Sources: z-lab's dflash 0.1.0, `extract_context_feature`, on transformers' `hidden_states`;
    SGLang, `layers_to_capture` of its models.
    """
    spec = cache.spec
    if (last := spec.target.num_layers - 1) not in spec.target_layer_ids:
        return None
    return (
        f"block {last} is the target's last, whose state before the final norm was trained on; "
        "z-lab's client gives the one behind it, and SGLang what the next block is given, of which "
        "there is none"
    )


def _head(facts: Facts) -> list[str]:
    base = [f"base_model: {facts.target}"] if is_hub_id(facts.target) else []
    return [
        "---",
        "# license: yours to choose; that of the target and of the data may bind you",
        *base,
        f"library_name: {facts.form}",
        "pipeline_tag: text-generation",
        "tags:",
        "- speculative-decoding",
        "- draft-model",
        "- dflash",
        "---",
    ]


def _acceptance(facts: Facts) -> list[str]:
    last = facts.evaluations[-1] if facts.evaluations else {}
    if last.get("tau_walk") is None:
        return ["Not measured on held-out samples."]
    rows = [("chain", f"{last['tau_chain']:.3f}"), ("walk", f"{last['tau_walk']:.3f}")]
    rows += [
        (f"tree of {size} nodes", f"{tau:.3f}")
        for size, tau in sorted(last.get("tau_tree", {}).items(), key=lambda item: int(item[0]))
        if tau is not None
    ]
    return [
        f"Mean tokens per pass of the target, its own one included, over {last['num_samples']} "
        f"held-out samples after step {last['step']}, computed from cached states with greedy "
        "verification. chain: every position starts a block; walk: blocks follow each other as "
        "in serving.",
        "",
        *_table(("", "acceptance length"), rows),
        *(["", _NOT_REDUCED] if facts.draft_vocabulary is not None else []),
    ]


def _serving(drafter: DrafterConfig, facts: Facts) -> list[str]:
    drafted = drafter.block_size - 1
    if facts.form == "speculators":
        return [
            "vLLM (as of 002e77c; it takes the target from `config.json`):",
            "",
            "```sh",
            "vllm serve USER/NAME",
            "```",
            "",
            "SGLang does not read this format: export with `--format dflash` for it.",
        ]
    speculative = json.dumps(
        {"method": "dflash", "model": "USER/NAME", "num_speculative_tokens": drafted}
    )
    mixed = any(drafter.slides) and not all(drafter.slides)
    return [
        "vLLM (as of 036a00d):" if not mixed else "vLLM (as of 036a00d, V2 model runner):",
        "",
        "```sh",
        f"vllm serve {facts.target} --speculative-config '{speculative}'",
        "```",
        "",
        "SGLang (as of 00731f0):",
        "",
        "```sh",
        f"python -m sglang.launch_server --model-path {facts.target} \\",
        "  --speculative-algorithm DFLASH --speculative-draft-model-path USER/NAME \\",
        f"  --speculative-num-draft-tokens {drafter.block_size}",
        "```",
        "",
        'In Python, the `dflash` package: `DFlashDraftModel.from_pretrained("USER/NAME")`.',
    ]


def _data(cache: Caches, split: Split) -> list[str]:
    index = cache.index
    rows = []
    for number, tag in enumerate(cache.sources):
        of_tag = index.source == number
        tokens, supervised = index.num_tokens[of_tag].sum(), index.num_supervised[of_tag].sum()
        rows.append((tag, f"{of_tag.sum():,}", f"{tokens:,}", f"{supervised:,}"))
    tokens, supervised = index.num_tokens.sum(), index.num_supervised.sum()
    rows.append(("all", f"{len(index):,}", f"{tokens:,}", f"{supervised:,}"))
    written_by = _written_by(cache)
    return [
        *_table(("source", "samples", "tokens", "supervised"), rows),
        "",
        f"Trained on {len(split.train):,} samples, {len(split.heldout):,} held out by a hash of "
        f"their prompts, {split.num_other_sources:,} of sources that were not chosen.",
        *(["", f"Answers written by (samples, when planned): {written_by}."] if written_by else []),
    ]


def _written_by(cache: Caches) -> str:
    """The models that wrote the answers, by the plans of the caches; empty if none says."""
    counts: dict[str, int] = {}
    for part in cache.parts:
        for plan in sorted({shard_id.partition("-")[0] for shard_id in part.shard_ids}):
            for model, number in part.plan_report(plan).get("generated_by", {}).items():
                counts[model] = counts.get(model, 0) + int(number)
    return ", ".join(f"{model} {number:,}" for model, number in sorted(counts.items()))


def _recipe(config: dict[str, Any]) -> list[tuple[str, str]]:
    sections = {name: config[name] for name in _RECIPE}
    return [
        (key, json.dumps(value))
        for key, value in configs.flatten(sections).items()
        if value is not None and key not in _NOT_LEARNED
    ]


def _windows(drafter: DrafterConfig) -> str:
    if not any(drafter.slides):
        return ""
    sliding = [i for i, slides in enumerate(drafter.slides) if slides]
    return f"; {sliding} slide, {drafter.sliding_window} positions"


def _table(head: tuple[str, ...], rows: list[Any]) -> list[str]:
    lines = [head, ("---",) * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
