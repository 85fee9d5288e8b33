"""A checkpoint as a drafter directory that others load: whole and checked, or not at all."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shared.errors import ConfigError, RunError
from shared.files import read_json, replace_directory, staging_directory, write_json, writing
from trainer.caches import Caches, generations_of
from trainer.drafter import Drafter
from trainer.exporting.card import Facts, is_hub_id, last_block, model_card
from trainer.exporting.checks import (
    MODEL,
    check_forward,
    check_product,
    check_readings,
    check_tensors,
)
from trainer.exporting.speculators import (
    as_dflash,
    speculators_config,
    speculators_shapes,
    vocabulary_tensors,
)
from trainer.exporting.vocabulary import coverage, most_frequent
from trainer.exporting.zlab import dflash_config, dflash_shapes
from trainer.projection import unprojected
from trainer.run import NEWEST, Run
from trainer.session import Session, read_target_config
from trainer.snapshot import Snapshot

logger = logging.getLogger(__name__)

CONFIG = "config.json"
CARD = "README.md"
EXPORTED = frozenset({CONFIG, MODEL, CARD})

Tensors = dict[str, Tensor]


def export_dflash(
    run: Run, out: Path, *, target: str | None = None, checkpoint: str = NEWEST
) -> Path:
    """Write a checkpoint of `run` to `out` in z-lab's layout.

    Args:
        target: hub id or path of the target for the model card; None takes that of the cache.
        checkpoint: as `Run.require_checkpoint` takes it.

    Raises:
        RunError: there is no checkpoint, or what was written is not what was trained.
    """
    snapshot, session = _open(run, checkpoint)
    config = dflash_config(session.config.drafter, session.cache, read_target_config(session.cache))
    facts = _facts(run, snapshot, session, "dflash", target)
    return _write(session, snapshot, facts, config, {}, out)


def export_speculators(
    run: Run,
    out: Path,
    *,
    target: str | None = None,
    checkpoint: str = NEWEST,
    draft_vocab_size: int | None = None,
) -> Path:
    """Write a checkpoint of `run` to `out` in the format of speculators.

    Args:
        target: hub id or path that consumers load the target from; None takes that of the cache.
        checkpoint: as `Run.require_checkpoint` takes it.
        draft_vocab_size: reduce the vocabulary to the tokens most frequent in the training
            samples; None keeps all.

    Raises:
        ConfigError: the format cannot say what was trained, or that size is not below the target's.
        RunError: there is no checkpoint, or what was written is not what was trained.
    """
    snapshot, session = _open(run, checkpoint)
    cache = session.cache
    facts = _facts(run, snapshot, session, "speculators", target)
    if not is_hub_id(facts.target):
        logger.warning(
            "consumers will load the target from %r, which is a path. Give its hub id by --target "
            "before you publish.",
            facts.target,
        )
    extra: Tensors = {}
    vocab_size = cache.spec.target.vocab_size
    if draft_vocab_size is not None:
        if not 0 < draft_vocab_size < vocab_size:
            raise ConfigError(
                f"--draft-vocab {draft_vocab_size}: must be below the target's {vocab_size:,} "
                "tokens. Leave it out to keep them all."
            )
        kept, description = _reduce(session, draft_vocab_size)
        extra = vocabulary_tensors(kept, cache.head().lm_head_VD)
        facts = replace(facts, draft_vocabulary=description)
    whole = json.loads(cache.parts[0].target_file("config.json"))
    config = speculators_config(
        session.config.drafter,
        cache,
        read_target_config(cache),
        verifier=facts.target,
        architectures=list(whole.get("architectures") or []),
        draft_vocab_size=draft_vocab_size or vocab_size,
    )
    return _write(session, snapshot, facts, config, extra, out)


def _reduce(session: Session, size: int) -> tuple[Tensor, str]:
    kept, counts_V = most_frequent(session.cache, session.split.train, size)
    share = coverage(kept, counts_V)
    text = f"{size:,} tokens, {100 * share:.2f} % of the supervised tokens trained on"
    logger.info("draft vocabulary: %s", text)
    return kept, text


def _open(run: Run, checkpoint: str) -> tuple[Snapshot, Session]:
    snapshot = run.require_checkpoint(checkpoint)
    session = Session.open(run.config(), generations=generations_of(snapshot.cache))
    session.cache.require_same(snapshot.cache, str(run.path))
    return snapshot, session


def _facts(run: Run, snapshot: Snapshot, session: Session, form: str, target: str | None) -> Facts:
    return Facts(
        form=form,
        target=target or _target_of(session.cache),
        step=snapshot.step,
        evaluations=run.evaluations(snapshot.step),
        init_from=snapshot.state.get("init_from"),
    )


def _target_of(cache: Caches) -> str:
    """What the cache was captured from. A path cannot be taken for a name on the hub."""
    description = cache.parts[0].description
    name = str(description["target_name"])
    is_path = description["target_revision"] is None
    return f"./{name}" if is_path and is_hub_id(name) else name


def _write(
    session: Session,
    snapshot: Snapshot,
    facts: Facts,
    config: dict[str, Any],
    extra: Tensors,
    out: Path,
) -> Path:
    """Write, read back, check, and only then put in place of an earlier export."""
    whole = unprojected(session.cache, snapshot.drafter)
    tensors = {name: value.to(torch.bfloat16) for name, value in whole.items()} | extra
    _require_replaceable(out)
    with staging_directory(out) as staging, writing(out):
        partial = staging / "new"
        partial.mkdir()
        save_file(tensors, partial / MODEL, {"format": "pt"})
        write_json(partial / CONFIG, config)
        (partial / CARD).write_bytes(model_card(session, facts).encode())
        check_export(partial, facts.form, session, tensors)
        if (projection := session.cache.projection()) is not None:
            check_product(partial, _factored(session, snapshot, tensors), projection)
        replace_directory(partial, out)
    logger.info("exported step %d to %s", snapshot.step, out)
    if (note := last_block(session.cache)) is not None:
        logger.warning("%s: %s. Make sure that your server gives this state.", out, note)
    return out


def _factored(session: Session, snapshot: Snapshot, exported: Tensors) -> Drafter:
    """The trained factor with the other weights as they are exported: only `fc` differs."""
    names = session.drafter.state_dict()
    rounded = {name: exported[name].float() for name in names}
    session.drafter.load_state_dict(rounded | {"fc.weight": snapshot.drafter["fc.weight"]})
    return session.drafter


def check_export(directory: Path, form: str, session: Session, trained: Tensors) -> None:
    """Read back what was written in the format `form` and compare it with what was trained.

    Raises:
        RunError: naming what differs.
    """
    config = read_json(directory / CONFIG)
    shapes_of: Callable[[dict[str, Any]], dict[str, tuple[int, ...]]]
    shapes_of = dflash_shapes if form == "dflash" else speculators_shapes
    check_tensors(directory, shapes_of(config), trained)
    taps = session.cache.spec.target_layer_ids
    check_readings(config, form, session.config.drafter, taps, str(directory))
    names = session.drafter.state_dict()
    drafter = session.drafter
    if session.cache.spec.projection is not None:
        target = session.cache.spec.target
        num_features = session.cache.spec.unprojected().num_features
        drafter = Drafter(session.config.drafter, target.hidden_size, num_features)
    drafter.load_state_dict({name: trained[name].float() for name in names})
    in_dflash = config if form == "dflash" else as_dflash(config)
    check_forward(directory, in_dflash, drafter)


def _require_replaceable(out: Path) -> None:
    """Refuse to replace anything but an earlier export.

    Raises:
        RunError: `out` holds something else.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise RunError(f"{out}: not a directory. Choose another place for the export.")
    if out.is_dir() and (foreign := {path.name for path in out.iterdir()} - EXPORTED):
        raise RunError(
            f"{out}: holds other files ({', '.join(sorted(foreign)[:8])}). "
            "Choose an empty or a new directory for the export."
        )
