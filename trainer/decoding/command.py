"""`trainer evaluate RUN --target DIR`: from arguments to figures."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from shared.bar import Bar
from shared.errors import ConfigError
from trainer.decoding.evaluation import DecodingConfig, Evaluation
from trainer.decoding.prompt_sets import SETS
from trainer.decoding.prompts import PromptEncoder, collect_prompts, read_rows
from trainer.decoding.source import DrafterSource
from trainer.decoding.target import Target
from trainer.session import enter_device, pick_device


def evaluate_with_target(
    drafter: Path,
    target_path: Path,
    *,
    files: Sequence[Path],
    sets: Sequence[str],
    limit: int | None,
    template_arguments: dict[str, Any],
    config: DecodingConfig,
    dtype: str,
    device: str,
    checkpoint: str,
) -> dict[str, Any]:
    """Decode prompts with the target, alone and with a drafter.

    Args:
        drafter: a run, or a directory in z-lab's layout.
        files: JSONL files with prompts.
        sets: names of prompt sets.
        limit: prompts at most.
        checkpoint: of a run, as `Run.require_checkpoint` takes it.

    Raises:
        RunError, TargetError, DataError, ConfigError: what is given cannot be used.
    """
    if config.temperature and config.tree_budgets:
        raise ConfigError("--tree-budget: trees are decoded greedily. Leave out --temperature.")
    source = DrafterSource.read(drafter, checkpoint)
    template_arguments = source.template_arguments(template_arguments)
    encoder = PromptEncoder(target_path, template_arguments)
    picked = pick_device(device, setting="--device")
    enter_device(picked)
    target = Target.load(target_path, source.target_layer_ids, dtype=dtype, device=picked)
    source.require_target(target)
    source.compare_weights(target_path)
    evaluation = Evaluation(target, source.drafter.to(target.device, target.dtype).eval(), config)
    # The last block may reach beyond the text.
    room = config.max_new_tokens + source.drafter.config.block_size
    prompts, counts = collect_prompts(
        chain(read_rows(files), *(SETS[name].rows(name) for name in sets)),
        encoder,
        limit=limit,
        max_tokens=target.max_positions - room,
        vocab_size=target.config.vocab_size,
    )
    num_texts = len(prompts) * len(config.methods)
    with Bar("decode", "text", num_texts) as bar:
        evaluation.run(prompts, bar.add)
    return {
        "drafter": source.where,
        "step": source.step,
        "target": str(target_path),
        "template_arguments": template_arguments,
        "dtype": dtype,
        "device": str(target.device),
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "seed": config.seed,
        "prompts": {"num_prompts": counts.num_prompts, "num_too_long": counts.num_too_long},
        **evaluation.summary(),
    }
