"""A run directory: its configuration, evaluations and checkpoints."""

import logging
from pathlib import Path
from typing import Any

from shared import config as configs
from shared.errors import ConfigError, RunError
from shared.files import read_json, write_json, writing
from trainer import checkpoint as checkpoints
from trainer.config import TrainConfig
from trainer.snapshot import Snapshot

logger = logging.getLogger(__name__)

_CONFIG = "config.json"
_EVALUATIONS = "evaluations"
_FREE_SECTIONS = ("run", "loader", "evaluate", "checkpoint", "tracking")
"""Settings that may change when a run is resumed: they do not touch what is learned."""

_FREE_KEYS = ("cache.path", "train.device")


class Run:
    """The directory of one training run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def newest_checkpoint(self) -> Snapshot | None:
        """The newest whole checkpoint; None before the first."""
        path = checkpoints.newest_valid(self.path)
        return None if path is None else checkpoints.load(path, verify=False)

    def begin(self, config: TrainConfig, *, resumed: bool) -> None:
        """Record the configuration; on a resume, refuse one that would change what is learned.

        Raises:
            RunError: naming the keys that differ.
        """
        if resumed and (self.path / _CONFIG).exists():
            stored = configs.flatten(read_json(self.path / _CONFIG))
            asked = configs.flatten(configs.to_dict(config))
            changed = [
                f"{key}: {stored.get(key)!r} before, {asked.get(key)!r} now"
                for key in sorted(stored.keys() | asked.keys())
                if stored.get(key) != asked.get(key)
                and key.partition(".")[0] not in _FREE_SECTIONS
                and key not in _FREE_KEYS
            ]
            if changed:
                raise RunError(
                    f"{self.path}: cannot resume with other settings ({'; '.join(changed)}). "
                    "Restore them, give the run another path, or begin anew with --fresh."
                )
        with writing(self.path):
            (self.path / _EVALUATIONS).mkdir(parents=True, exist_ok=True)
        write_json(self.path / _CONFIG, configs.to_dict(config))

    def config(self) -> TrainConfig:
        """The configuration that the run was started with.

        Raises:
            RunError: there is no run here.
        """
        if not (self.path / _CONFIG).is_file():
            raise RunError(f"{self.path}: no run here ({_CONFIG} is missing). Run `make train`.")
        try:
            return configs.build(TrainConfig, read_json(self.path / _CONFIG))
        except ConfigError as error:
            raise RunError(f"{self.path / _CONFIG}: {error}") from error

    def require_checkpoint(self) -> Snapshot:
        """The newest whole checkpoint.

        Raises:
            RunError: there is none yet.
        """
        if (snapshot := self.newest_checkpoint()) is None:
            raise RunError(f"{self.path}: no checkpoint yet. Run `make train`.")
        return snapshot

    def write_evaluation(self, step: int, heldout: dict[str, Any]) -> None:
        write_json(self.path / _EVALUATIONS / f"step-{step:08d}.json", {"step": step, **heldout})

    def evaluations(self) -> list[dict[str, Any]]:
        """All evaluations, by step."""
        return [read_json(path) for path in sorted((self.path / _EVALUATIONS).glob("step-*.json"))]
