"""Held-out loss and acceptance length from the cache alone: no target is needed.

The gold tokens are the target's own; so what it would accept of a block is known from them.

A anchors   K block size   P = K-1 drafted slots   T ranks kept   M slots of a chunk   V vocabulary
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shared.bar import Bar
from shared.files import sha256_bytes
from shared.location import Location
from trainer.acceptance import chain_accepted, rank_of_gold, segments, tree_accepted
from trainer.anchors import legal_anchors
from trainer.batch import Batch, collate, require_no_mask_token
from trainer.caches import generations_of
from trainer.logits import room_for_logits
from trainer.loss import weighing
from trainer.metrics import AcceptanceTotals
from trainer.ranking import NUM_RANKS, best_tokens
from trainer.run import HELDOUT, INDEX, NEWEST, Run
from trainer.sampler import bucket_edges
from trainer.session import Session
from trainer.snapshot import restore
from trainer.step import autocast, batch_loss, forward_blocks
from trainer.teacher import teacher_of

ANCHORS_PER_FORWARD = 256
LOGITS_BYTES, GPU_LOGITS_BYTES = 2**25, 2**29
"""Of the slots whose logits exist at one time, in float32. A GPU would wait for the LM head, which
is read again for each such part."""


@torch.no_grad()
def evaluate(
    session: Session, progress: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """Metrics over the held-out samples, the same ones at every call: see `AcceptanceTotals`.

    Every supervised position is an anchor, so nothing is drawn at random. `heldout_sha256` is
    that of the sample ids, and so of the anchors: figures with the same one may be compared.
    `index_sha256` is that of the cache.
    """
    config, cache = session.config, session.cache
    edges = bucket_edges(cache.index.num_tokens[session.split.train], config.sampler)
    totals = AcceptanceTotals(
        num_slots=config.drafter.block_size - 1,
        num_ranks=min(NUM_RANKS, cache.spec.target.vocab_size),
        budgets=config.evaluate.tree_budgets,
        num_buckets=len(edges) - 1,
    )
    chosen = session.split.heldout[: config.evaluate.max_samples]
    session.drafter.eval()
    for done, position in enumerate(chosen.tolist(), 1):
        sample = cache.read(position)
        bucket = int(np.clip(np.searchsorted(edges, len(sample.token_ids)) - 1, 0, len(edges) - 2))
        anchors = legal_anchors(sample.loss_mask.astype(bool))
        chain = np.zeros(len(sample.token_ids), np.int64)
        tree = np.zeros((len(sample.token_ids), len(totals.budgets)), np.int64)
        for start in range(0, len(anchors), ANCHORS_PER_FORWARD):
            part = anchors[start : start + ANCHORS_PER_FORWARD]
            batch = collate([sample], [part], epoch=0, bucket=bucket)
            require_no_mask_token(batch, session.config.drafter.mask_token_id)
            batch = batch.to(session.device)
            chain[part], tree[part] = _add_anchors(session, batch, totals)
        for begin, end in segments(sample.loss_mask):
            totals.add_walk(chain[begin:end], tree[begin:end])
        progress(done)
    session.drafter.train()
    return {
        **totals.summary(),
        "num_samples": len(chosen),
        HELDOUT: sha256_bytes(cache.index.sample_ids[chosen].tobytes()),
        INDEX: cache.describe()["index_sha256"],
    }


def _add_anchors(
    session: Session, batch: Batch, totals: AcceptanceTotals
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Add the anchors of one batch; returns their accepted drafts, chain [A] and trees [A, U]."""
    config = session.config
    features_SLD, last_hidden_SD = session.features.split(batch)
    if config.train.zero_features:
        features_SLD = torch.zeros_like(features_SLD)
    with autocast(session.device, config.train.compute_dtype):
        forward = forward_blocks(
            session.drafter, session.head, batch, features_SLD, config.drafter.mask_token_id
        )
    weigh = weighing(config.loss, config.drafter.block_size, session.device)
    teacher = teacher_of(config.loss, session.head, last_hidden_SD, forward.blocks)
    loss = batch_loss(
        forward,
        session.head,
        weigh,
        teacher,
        anchors_per_chunk=config.loss.anchors_per_chunk,
        with_liger=session.with_liger,
    )
    weight_AK = weigh(loss.ce_AK, forward.blocks.supervised_AK)
    log_p_APT, token_APT = _ranked(
        forward.hidden_AKD[:, 1:], session.head.lm_head_VD, totals.num_ranks
    )
    gold_AP = forward.blocks.label_AK[:, 1:].cpu().numpy()
    num_gold_A = forward.blocks.supervised_AK[:, 1:].long().cumprod(1).sum(1).cpu().numpy()
    rank_AP = rank_of_gold(token_APT, gold_AP)
    tree_AU = tree_accepted(log_p_APT, rank_AP, num_gold_A, totals.budgets)
    totals.add(
        gold_rank=rank_AP,
        num_gold=num_gold_A,
        tree=tree_AU,
        loss=(weight_AK * loss.loss_AK).sum(1).double().cpu().numpy(),
        weight=weight_AK.sum(1).double().cpu().numpy(),
        bucket=np.full(len(rank_AP), batch.bucket),
    )
    return chain_accepted(rank_AP, num_gold_A), tree_AU


def slots_per_chunk(vocab_size: int, device: torch.device) -> int:
    """Slots of which the logits are held at one time."""
    held = LOGITS_BYTES if device.type == "cpu" else GPU_LOGITS_BYTES
    return max(held // (vocab_size * 4), 1)


def _ranked(
    hidden_APD: Tensor, lm_head_VD: Tensor, num_ranks: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Best tokens of every slot and their log-probabilities, ties by rising id, [A, P, T] each."""
    log_ps, tokens = [], []
    size = slots_per_chunk(len(lm_head_VD), lm_head_VD.device)
    room_MV = hidden_APD.new_empty((size, len(lm_head_VD)), dtype=torch.float32)
    for hidden_MD in torch.split(hidden_APD.flatten(0, 1).to(lm_head_VD.dtype), size):
        narrow_MV = room_for_logits(len(hidden_MD), lm_head_VD)
        logits_MV = room_MV[: len(hidden_MD)]
        logits_MV.copy_(torch.mm(hidden_MD, lm_head_VD.T, out=narrow_MV))
        log_p_MT, token_MT = best_tokens(logits_MV, num_ranks)
        log_ps.append(log_p_MT)
        tokens.append(token_MT)
    shape = (*hidden_APD.shape[:2], num_ranks)
    return (
        torch.cat(log_ps).reshape(shape).cpu().numpy(),
        torch.cat(tokens).reshape(shape).cpu().numpy(),
    )


def evaluate_run(
    run: Run, *, cache: Location | None, max_samples: int | None, checkpoint: str = NEWEST
) -> dict[str, Any]:
    """Evaluate a checkpoint of `run`, on its own cache or another of the same kind.

    Args:
        checkpoint: as `Run.require_checkpoint` takes it.

    Raises:
        RunError: there is no such checkpoint.
        CacheIncompatibleError: the cache holds states of another kind.
    """
    snapshot = run.require_checkpoint(checkpoint)
    config = run.config()
    generations: list[int] | None = generations_of(snapshot.cache)
    if cache is not None:
        config = replace(config, cache=replace(config.cache, path=cache))
        generations = None
    if max_samples is not None:
        config = replace(config, evaluate=replace(config.evaluate, max_samples=max_samples))
    session = Session.open(config, generations=generations)
    session.cache.require_same(snapshot.cache, str(run.path), same_samples=cache is None)
    restore(snapshot, session.drafter)
    chosen = min(len(session.split.heldout), config.evaluate.max_samples)
    with Bar("evaluate", "sample", chosen) as bar:
        return {"step": snapshot.step, **evaluate(session, bar.reach)}
