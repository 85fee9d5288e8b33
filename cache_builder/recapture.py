"""Running stored samples through the target again, and comparing.

T tokens of one sample   L stored rows   N rows that they may be   D hidden size, or the rank
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cache_builder.config import TargetConfig
from cache_builder.distance import NOISE, block_distances, is_of_block, nearest_block
from cache_builder.target import Target
from cache_builder.target_files import (
    describe_target,
    require_unchanged,
    resolve_target,
    stamp_files,
)
from cache_builder.verify import Problem
from shared import config as configs
from shared.bar import tracked
from shared.cache import Cache
from shared.errors import CacheError, CacheIncompatibleError, ConfigError
from shared.location import Location
from shared.quantity import count
from shared.spec import CaptureSpec


@dataclass(slots=True)
class Recapture:
    """How far what is stored lies from what the target gives now."""

    spec: CaptureSpec
    num_samples: int = 0
    num_equal: int = 0
    """Samples whose every bit is the same."""

    largest: list[float] = field(default_factory=list)
    """Per row: the largest distance of a sample, as in `block_distances`."""

    allowed: list[float] = field(default_factory=list)
    """Per row: the smallest distance that would have been a problem."""

    problems: list[Problem] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_samples": self.num_samples,
            "num_equal": self.num_equal,
            "layers": [
                {**layer, "largest": largest, "allowed": allowed}
                for layer, largest, allowed in zip(
                    self.spec.describe_layers(), self.largest, self.allowed, strict=True
                )
            ],
        }


def recapture(path: Location, target_path: Path, num_samples: int, *, seed: int = 0) -> Recapture:
    """Compare `num_samples` random samples, decoded, with what the target in `target_path` gives.

    A sample is a problem if a layer differs by more than `NOISE` plus what the codec loses of it,
    or if the block before or behind it is clearly nearer; of projected states, if their projection
    does, or one with such a neighbour in place of one block is nearer. Each is run alone, not in
    the batch it was captured in. Where all is within that, ids, positions and layers are the right
    ones too.

    Raises:
        CacheError: the cache cannot be opened.
        CacheIncompatibleError: the target is another one, or its files were changed.
        TargetError: it cannot be loaded.
    """
    cache = Cache(path)
    nearby = _with_neighbours(cache.spec)
    target = _open_target(cache, target_path, nearby)
    num_layers = cache.spec.num_captured
    report = Recapture(cache.spec, largest=[0.0] * num_layers, allowed=[1.0] * num_layers)
    count = min(num_samples, len(cache.index))
    chosen = np.random.default_rng(seed).choice(len(cache.index), count, replace=False)
    candidates = _Candidates(cache, nearby)
    for position in tracked(np.sort(chosen).tolist(), "recapture", "sample", count):
        _compare(cache, target, candidates, position, report)
    return report


def _with_neighbours(spec: CaptureSpec) -> CaptureSpec:
    """Also the blocks on either side of those captured: an id that is off by one must not pass."""
    near = {block for k in spec.target_layer_ids for block in (k - 1, k, k + 1)}
    blocks = sorted(near & set(range(spec.target.num_layers)))
    return replace(spec.unprojected(), target_layer_ids=tuple(blocks))


def _open_target(cache: Cache, path: Path, nearby: CaptureSpec) -> Target:
    spec = cache.spec
    # The kernel of imported states is not known; any must give them within the noise.
    known = {} if "origin" in cache.description else {"attention": spec.target.attention}
    try:
        config = configs.build(
            TargetConfig, {"path": str(path), "dtype": spec.target.dtype, **known}
        )
    except ConfigError as error:
        raise CacheIncompatibleError(f"{cache.path}: {error}") from None
    place = resolve_target(config)
    stamps = stamp_files(place)
    found = replace(describe_target(place, config), attention=spec.target.attention)
    lines = configs.differences(
        configs.to_dict(found), configs.to_dict(spec.target), names=("there", "in the cache")
    )
    if lines:
        raise CacheIncompatibleError(
            f"{path}: not the target of {cache.path} ({'; '.join(lines)}). Name the directory it "
            "was built from."
        )
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    target = Target.load(place, config, nearby.target_layer_ids, nearby.last_hidden, device)
    require_unchanged(place, stamps)
    return target


class _Candidates:
    """What the stored rows of a sample may be: those that they should be, and near misses.

    Attributes:
        names: of each, N of them.
    """

    def __init__(self, cache: Cache, nearby: CaptureSpec) -> None:
        """`nearby` has the layers that the target gives."""
        self._projection = cache.projection()
        self._layers = nearby.layer_names
        spec = cache.spec.unprojected()
        self.names = list(nearby.layer_names)
        self._choices = [[self._layers.index(name) for name in spec.layer_names]]
        if self._projection is None:
            return
        self.names = list(cache.spec.layer_names)
        for tap, block in enumerate(spec.target_layer_ids):
            for other in (block - 1, block + 1):
                if (name := f"block {other}") in self._layers:
                    swapped = self._choices[0].copy()
                    swapped[tap] = self._layers.index(name)
                    self._choices.append(swapped)
                    self.names.append(f"the projection with {name} in place of block {block}")

    def of(self, fresh_TMD: Tensor) -> Tensor:
        """All of them, bfloat16 [T, N, D], from the M layers that the target gave."""
        if self._projection is None:
            return fresh_TMD
        own, *others = [self._projection.rows(fresh_TMD[:, choice]) for choice in self._choices]
        return torch.cat([own, *(rows[:, :1] for rows in others)], 1)


def _compare(
    cache: Cache, target: Target, candidates: _Candidates, position: int, report: Recapture
) -> None:
    """Compare one sample."""
    shard_id = cache.shard_ids[int(cache.index.shard[position])]
    where = f"{cache.path}: shard {shard_id}, sample {cache.index.sample_id(position)}"
    try:
        sample = cache.read(position)
        calibration = cache.calibration(sample.calibration)
        stored_TLD = cache.unpack(sample)
    except CacheError as error:
        report.problems.append(Problem("shard", shard_id, "damaged", str(error)))
        return
    names = candidates.names
    own_L = [names.index(name) for name in report.spec.layer_names]
    fresh_TND = candidates.of(target.capture([sample.token_ids])[0].cpu())
    fresh_TLD = fresh_TND[:, own_L].contiguous()
    report.num_samples += 1
    report.num_equal += torch.equal(stored_TLD.view(torch.int16), fresh_TLD.view(torch.int16))
    lossy_TLD = cache.codec.unpack(cache.codec.pack(fresh_TLD, calibration), calibration)
    distance_LN = block_distances(stored_TLD, fresh_TND)
    for number, own in enumerate(own_L):
        loss = block_distances(lossy_TLD[:, [number]], fresh_TND[:, [own]])
        distance, allowed = float(distance_LN[number, own]), NOISE + float(loss)
        report.largest[number] = max(report.largest[number], distance)
        report.allowed[number] = min(report.allowed[number], allowed)
        if not is_of_block(distance_LN[number], own, allowed):
            nearest = nearest_block(distance_LN[number])
            least = float(distance_LN[number, nearest])
            message = (
                f"{where}: {names[own]} differs from the target's by "
                f"{100 * distance:.2f} %, at most {100 * allowed:.2f} % is noise and codec"
            )
            if nearest != own and least <= allowed:
                message += (
                    f". They are those of {names[nearest]}, which is {100 * least:.2f} % away"
                )
            report.problems.append(Problem("shard", shard_id, "differs", message))


def rows(report: Recapture) -> list[tuple[str, str]]:
    """`report` as a table of names and values."""
    table = [
        (
            "captured again",
            f"{count(report.num_samples, 'sample')}, {report.num_equal:,} equal to the bit",
        )
    ]
    for layer in report.to_dict()["layers"]:
        table.append(
            (
                f"  {layer['name']}",
                f"largest difference {100 * layer['largest']:.3f} %, "
                f"allowed {100 * layer['allowed']:.2f} %",
            )
        )
    return table
