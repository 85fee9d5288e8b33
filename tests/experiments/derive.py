"""`python -m tests.experiments.derive`: `cache-builder build` with states captured before.

They are read from a lossless cache of the same samples instead of a forward of the target; data,
plan, projection, codec and store are the product's. With the settings of that cache the states are
the same to the bit; with other batches a forward would round a few of their sums otherwise.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import click
import numpy as np
import numpy.typing as npt
from torch import Tensor

from cache_builder.build import build
from cache_builder.config import BuildConfig, WorkersConfig
from cache_builder.target import Target
from shared import cli, config
from shared.cache import Cache
from shared.codec import PRESETS


@contextmanager
def captured(path: Path) -> Iterator[None]:
    """States of the samples in the cache `path` take the place of a forward.

    Raises:
        KeyError: from a forward, a sample is not there.
        ValueError: the cache does not hold the states to the bit.
    """
    cache = Cache(path)
    if cache.spec.codec != PRESETS["lossless"].to_dict() or cache.spec.projection is not None:
        raise ValueError(f"{path}: does not hold the states themselves, to the bit")
    positions = {cache.tokens(n)[0].tobytes(): n for n in range(len(cache.index))}

    def capture(self: Target, token_ids: Sequence[npt.NDArray[np.int32]]) -> list[Tensor]:
        return [cache.unpack(cache.read(positions[ids.tobytes()])) for ids in token_ids]

    with patch.object(Target, "capture", capture):
        yield


@click.command()
@cli.config_options
@click.option("--states", type=click.Path(path_type=Path), required=True, help="Lossless cache.")
def main(path: Path, overrides: tuple[str, ...], states: Path) -> None:
    """Build a cache of the samples that STATES has, or of some of them, by its states."""
    settings = config.load(BuildConfig, path, overrides)
    in_process = WorkersConfig(num_workers=1)  # where the patch is
    with captured(states):
        build(replace(settings, workers=in_process))


if __name__ == "__main__":
    cli.run(main)
