"""What training, evaluation and export set up alike: cache, split, head and drafter."""

import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.cgroup import num_cores
from shared.errors import ConfigError, NonFiniteError
from shared.head import Head
from shared.quantity import count
from trainer.batch import Features, mask_token_in_text
from trainer.caches import Caches
from trainer.config import TrainConfig
from trainer.drafter import Drafter, num_parameters
from trainer.index import Split, split_samples
from trainer.liger import is_used
from trainer.precision import with_compute_dtype
from trainer.recipe import DrafterConfig, LossConfig

_RMS_SAMPLES = 32
_OPEN_SHARDS = 64
_MASK_SHARDS = 4
"""Shards whose text is searched for the mask token at the start."""
_BYTES_PER_PARAMETER = 16
"""Weight, gradient and two moments in float32."""
_GPU_HEAD_DIM = 16


@dataclass(frozen=True, eq=False, slots=True)
class Session:
    """A cache and a drafter that fit each other, on one device."""

    config: TrainConfig
    cache: Caches
    split: Split
    head: Head
    drafter: Drafter
    features: Features
    device: torch.device
    with_liger: bool
    """Whether the loss takes Liger's kernel."""

    @classmethod
    def open(
        cls, config: TrainConfig, *, generations: list[int] | None = None, local_rank: int = 0
    ) -> "Session":
        """Open the cache and build a freshly initialised drafter for it.

        Args:
            generations: of the caches; None takes the newest.
            local_rank: which of the GPUs `auto` means.

        Raises:
            CacheError: the cache is missing, damaged or of another version.
            ConfigError: the drafter's settings cannot be right for this target.
            RunError: nothing to train on.
        """
        device = pick_device(config.train.device, local_rank)
        enter_device(device)
        config = with_compute_dtype(config, device)
        cache = Caches(
            config.cache.paths,
            generations=generations,
            # What is read ahead may be of the next ones already.
            open_shards=max(_OPEN_SHARDS, 2 * config.sampler.shards_in_flight),
        )
        check_teacher(config.loss, cache)
        check_mask_token(config.drafter, cache)
        check_size(config.drafter, cache, device)
        check_head(config.drafter, device)
        dtype = torch.bfloat16 if config.train.compute_dtype == "bfloat16" else torch.float32
        drafter = Drafter(
            config.drafter,
            cache.spec.target.hidden_size,
            cache.spec.num_features,
            torch.Generator().manual_seed(config.train.seed),
        )
        return cls(
            config=config,
            cache=cache,
            split=split_samples(cache, config.cache),
            head=cache.head().to(device, dtype),
            drafter=drafter.to(device),
            features=Features(cache, device),
            device=device,
            with_liger=is_used(config.loss, device),
        )

    def channel_rms(self) -> Tensor:
        """Root mean square of every feature over some training samples, float32 [F].

        The first token of a sample is left out: its massive activations are not typical.

        Raises:
            NonFiniteError: naming a sample whose states are not finite.
        """
        train = self.split.train
        square_F = torch.zeros(self.drafter.fc.in_features)
        num_tokens = 0
        for position in train[:: -(-len(train) // _RMS_SAMPLES)].tolist():
            sample = self.cache.read(position)
            states_TLD = self.cache.unpack(sample)
            if not bool(states_TLD.isfinite().all()):  # it would spoil every weight
                raise NonFiniteError(
                    f"{self.cache}: states of sample {sample.sample_id} are not finite. Run "
                    "`cache-builder verify --deep`, then `cache-builder repair`."
                )
            states_TLD = states_TLD[1:]
            hidden_TF = states_TLD[:, : self.cache.spec.num_feature_rows].flatten(1).float()
            square_F += hidden_TF.square().sum(0)
            num_tokens += len(hidden_TF)
        return (square_F / max(num_tokens, 1)).sqrt()


def pick_device(name: str, local_rank: int = 0, *, setting: str = "train.device") -> torch.device:
    """The device of a setting; `auto` is the GPU of that number, where there are any.

    Raises:
        ConfigError: it is not there.
    """
    if name == "auto":
        return (
            torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
        )
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{setting} {name!r}: {error}") from None
    if device.type == "meta":
        raise ConfigError(f"{setting} {name!r}: holds no values. Choose cpu, cuda or auto.")
    if device.type == "cuda":
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        require_gpu(device.index, f"{setting} {name!r}")
        return device
    try:
        torch.empty(1, device=device)
    except Exception as error:  # of whatever stands for a kind of device that torch has none of
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"{setting} {name!r}: is not there ({reason}). Choose cpu, cuda or auto."
        ) from None
    return device


def enter_device(device: torch.device) -> None:
    """Begin to use a device.

    A GPU becomes the one that is meant where none is named: kernels of Triton and functions of
    `torch.cuda` mean the first one otherwise. A CPU gets no more threads than a container or job
    has cores: torch counts those of the machine.
    """
    if device.type == "cpu" and torch.get_num_threads() > num_cores():
        torch.set_num_threads(num_cores())
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.cuda.set_device(device)


def require_gpu(number: int, where: str) -> None:
    """Refuse a GPU that is not there.

    Raises:
        ConfigError: naming how many there are.
    """
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if number >= there:
        raise ConfigError(
            f"{where}: needs the GPU of number {number}, torch sees {count(there, 'CUDA device')} "
            "here."
        )


def check_teacher(config: LossConfig, cache: Caches) -> None:
    """Refuse a loss that needs the target's distribution where the cache does not give it.

    Raises:
        ConfigError: the last hidden state is not stored.
    """
    if config.needs_teacher and cache.spec.last_hidden == "none":
        raise ConfigError(
            f"loss.kind {config.kind!r} needs the target's last hidden state, which {cache} does "
            "not hold. Build a cache with capture.last_hidden = 'post_norm', or choose another "
            "loss.kind."
        )


def check_mask_token(config: DrafterConfig, cache: Caches) -> None:
    """Refuse a mask token that the target does not have, or that text contains.

    Raises:
        ConfigError: outside the embedding, or an end or padding token.
    """
    tokens, vocab_size = cache.spec.tokens, cache.spec.target.vocab_size
    if config.mask_token_id >= vocab_size:
        raise ConfigError(
            f"drafter.mask_token_id {config.mask_token_id}: the target's embedding has "
            f"{vocab_size} rows. Choose a reserved id below that."
        )
    taken = {*tokens.eos_token_ids, tokens.pad_token_id}
    if config.mask_token_id in taken:
        raise ConfigError(
            f"drafter.mask_token_id {config.mask_token_id} ends or pads text of this target. "
            "Choose a reserved id that never occurs in text."
        )


def require_unused_mask_token(
    config: DrafterConfig, cache: Caches, exclude: Collection[str] = ()
) -> None:
    """Look for the mask token in the text of the first shards, before anything is trained.

    The samples of every micro-batch are looked at too; this finds a common token at once.

    Args:
        exclude: ids of samples that are left out.

    Raises:
        ConfigError: naming a sample that holds it.
    """
    shards = ((part, shard_id) for part in cache.parts for shard_id in part.shard_ids)
    for part, shard_id in islice(shards, _MASK_SHARDS):
        reader = part.shard(shard_id)
        found = np.flatnonzero(reader.arrays["token_ids"] == config.mask_token_id)
        offsets = reader.arrays["sample_offsets"]
        rows, first = np.unique(
            np.searchsorted(offsets, found, side="right") - 1, return_index=True
        )
        for row, place in zip(rows.tolist(), found[first].tolist(), strict=True):
            if (sample_id := reader.sample_id(row)) not in exclude:
                raise mask_token_in_text(config.mask_token_id, sample_id, int(place - offsets[row]))


def check_size(config: DrafterConfig, cache: Caches, device: torch.device) -> None:
    """Refuse a drafter that cannot be held, before anything of that size is asked for.

    Raises:
        ConfigError: weights, gradients and AdamW's moments exceed the device's memory.
    """
    total = num_parameters(config, cache.spec.target.hidden_size, cache.spec.num_features)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if (needed := _BYTES_PER_PARAMETER * total) > memory:
        raise ConfigError(
            f"drafter: {total:,} parameters need {needed / 2**30:,.1f} GiB to be trained, {device} "
            f"has {memory / 2**30:,.1f} GiB in all. Look at drafter.num_layers, intermediate_size, "
            "num_heads and head_dim."
        )


def check_head(config: DrafterConfig, device: torch.device) -> None:
    """Refuse heads that the attention of a GPU cannot have.

    Raises:
        ConfigError: too few channels.
    """
    if device.type == "cuda" and config.head_dim < _GPU_HEAD_DIM:
        raise ConfigError(
            f"drafter.head_dim {config.head_dim}: on a GPU heads have {_GPU_HEAD_DIM} channels or "
            "more (flex_attention). Raise it, or set train.device = 'cpu'."
        )


def read_target_config(cache: Caches) -> dict[str, Any]:
    """The target's config.json as stored in the cache, the text part of it for wrappers."""
    fields: dict[str, Any] = json.loads(cache.parts[0].target_file("config.json"))
    text: dict[str, Any] = fields.get("text_config", fields)
    return text
