"""`trainer sweep`: from two TOML files to a table and a page."""

import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from shared.errors import ConfigError
from trainer.caches import Caches
from trainer.index import split_samples
from trainer.sweep.config import load_sweep
from trainer.sweep.files import list_files
from trainer.sweep.report import summary_lines, table_lines, trial_rows, write_page
from trainer.sweep.space import Space
from trainer.sweep.study import locked
from trainer.sweep.sweep import Sweep

logger = logging.getLogger(__name__)

PAGE = "sweep.html"


def run_sweep(
    directory: Path,
    space: Path,
    base: Path,
    overrides: Sequence[str],
    *,
    trials: int | None,
    jobs: int | None,
    say: Callable[[str], None],
) -> signal.Signals | None:
    """Begin or go on with the sweep in `directory`, and say what it found.

    Args:
        space, base: TOML files of the sweep and of the run that it varies.
        trials, jobs: replace those of `space`.

    Returns:
        The signal that stopped it; None if all trials are done.

    Raises:
        ConfigError: the files do not fit, or not each other, or no trial would have a figure.
            Nothing was started.
        CacheError: there is no cache, or it is damaged. Nothing was started.
        RunError: all trials failed, or the directory is not one of this sweep.
    """
    sweep = load_sweep(space)
    sweep = replace(sweep, trials=trials or sweep.trials, jobs=jobs or sweep.jobs)
    cache = Space(sweep, base, overrides).config.cache
    caches = cache.paths
    # What cannot start, or end with a figure, is refused before anything is written.
    if not len(split_samples(Caches(caches), cache).heldout):
        raise ConfigError(
            f"sweep.metric {sweep.metric}: no held-out sample to judge a trial by. Raise "
            f"cache.heldout_fraction, which is {cache.heldout_fraction:g}."
        )
    if idle := sweep.devices[sweep.jobs :]:
        logger.warning(
            "sweep.devices: %s stay idle, since sweep.jobs is %d", ", ".join(idle), sweep.jobs
        )
    with locked(directory):
        before = list_files(caches)
        search = Sweep(directory, sweep, base, overrides)
        stopped_by = search.run()
        rows = trial_rows(search.study, sweep)
        summary = summary_lines(search.study, sweep, directory, before, list_files(caches))
        for line in [*table_lines(rows), "", *summary]:
            say(line)
        write_page(directory / PAGE, search.study, rows, summary)
        say(f"plots: {directory / PAGE}")
        if stopped_by is None:
            search.require_one()
        else:
            logger.warning("stopped: the same command goes on from here.")
    return stopped_by
