"""What a run says before its first step: settings, optimizer, cache, split and order."""

import logging
import math

import torch

from shared import config as configs
from shared.errors import ConfigError
from shared.quantity import size
from trainer.footprint import Footprint, estimate, largest_batch, memory_of, require_memory
from trainer.optim import describe
from trainer.order import OrderReport, order_report
from trainer.precision import has_bfloat16_units
from trainer.ranks import Ranks
from trainer.sampler import epoch_batches
from trainer.session import Session

logger = logging.getLogger(__name__)

_FEW_HELDOUT = 10


def measure_order(session: Session, num_batches: int) -> tuple[OrderReport, Footprint]:
    """What the first epoch's order looks like, and the memory that its largest batch takes.

    Args:
        num_batches: micro-batches of a step that this process takes.

    Raises:
        ConfigError: the samples cannot be put in order with these settings, or not be held.
    """
    config = session.config
    lengths = session.cache.index.num_tokens[session.split.train].astype("int64")
    try:
        plan = epoch_batches(
            lengths,
            config.sampler,
            seed=config.train.seed,
            epoch=0,
            shard=session.cache.shard_numbers()[session.split.train],
        )
    except ValueError as error:
        raise ConfigError(f"sampler: {error}") from None
    cache = session.cache
    drawn = cache.index.num_anchors[session.split.train].clip(max=config.anchors.per_sample)
    spec = cache.spec
    heldout = session.split.heldout[: config.evaluate.max_samples]
    planes, width = cache.codec.plane_shape(spec.num_captured, spec.width)
    footprint = estimate(
        config,
        largest_batch(plan, lengths, drawn.astype("int64"), config.drafter.block_size),
        [session.head.embedding_VD, session.head.lm_head_VD],
        heldout_anchors=int(cache.index.num_anchors[heldout].max(initial=0)),
        num_features=spec.num_features,
        num_stored=spec.num_captured * spec.width,
        bytes_per_token=planes * width,
        num_batches=num_batches,
        device=session.device,
    )
    require_memory(footprint, session.device)
    return order_report(plan, lengths), footprint


def announce(
    session: Session,
    optimizer: torch.optim.Optimizer,
    order: OrderReport,
    footprint: Footprint,
    ranks: Ranks,
) -> None:
    """Log everything that is in force."""
    config, spec, split = session.config, session.cache.spec, session.split
    for key, value in configs.flatten(configs.to_dict(config)).items():
        logger.info("%s = %s", key, value)
    if config.train.compute_dtype == "bfloat16" and not has_bfloat16_units(session.device):
        logger.warning(
            "train.compute_dtype = bfloat16: %s has no units for it, in float32 a step is several "
            "times as fast. 'auto' takes what is faster.",
            session.device,
        )
    if config.loss.kind != "dpace":
        logger.info("gamma in force: %g", config.loss.resolve_gamma(config.drafter.block_size))
    if session.with_liger:
        logger.info("the loss takes Liger's kernel: loss.kernel = 'torch' does without")
    logger.info("optimizer: %s", describe(optimizer))
    for part in session.cache.parts:
        logger.info(
            "cache %s, generation %d: %d samples of %s",
            part.path,
            part.manifest.generation,
            len(part.index),
            ", ".join(part.manifest.sources),
        )
    logger.info(
        "fingerprint %s; target %s in %s, blocks %s, projection: %s, last hidden state: %s",
        spec.fingerprint[:16],
        spec.target.model_type,
        spec.target.dtype,
        list(spec.target_layer_ids),
        spec.projection or "none",
        spec.last_hidden,
    )
    logger.info(
        "%d samples to train on, %d held out, %d of other sources, %d excluded, "
        "%d without an anchor, %d repeated",
        len(split.train),
        len(split.heldout),
        split.num_other_sources,
        split.num_excluded,
        split.num_without_anchor,
        split.num_repeated,
    )
    if len(split.heldout) < _FEW_HELDOUT:
        logger.warning(
            "only %d held-out samples: acceptance will mean little. Raise cache.heldout_fraction.",
            len(split.heldout),
        )
    checked, saved = config.evaluate.every_steps, config.checkpoint.every_steps
    if checked and saved % checked:
        logger.warning(
            "evaluate.every_steps %d does not divide checkpoint.every_steps %d: only every %dth "
            "step and the last are evaluated and saved, and may be the best checkpoint.",
            checked,
            saved,
            math.lcm(checked, saved),
        )
    logger.info("order: %s", order)
    if ranks.size > 1:
        share = config.train.batches_per_step // ranks.size
        logger.info("%d ranks: each takes %d micro-batches of a step", ranks.size, share)
    logger.info(
        "memory: about %s of %s at the peak on %s: %s",
        size(footprint.on(session.device)),
        size(memory_of(session.device)),
        session.device,
        footprint,
    )
