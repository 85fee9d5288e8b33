"""The drafter to decode with: of a run's newest checkpoint, or of an exported directory."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared.errors import DraftCacheError, RunError
from shared.files import read_json
from shared.spec import CaptureSpec
from shared.weights import weights_sha256
from trainer.caches import Caches
from trainer.decoding.target import Target
from trainer.drafter import Drafter
from trainer.drafter_directory import read_config, read_weights, require_tensors
from trainer.exporting.zlab import dflash_shapes, drafter_of
from trainer.projection import unprojected
from trainer.run import NEWEST, Run

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class DrafterSource:
    """A drafter with the weights that are served, bfloat16, held as float32."""

    where: str
    drafter: Drafter
    target_layer_ids: tuple[int, ...]
    sizes: dict[str, int]
    """Of the target, as far as it is known: `hidden_size`, `num_hidden_layers`, `vocab_size`."""

    spec: CaptureSpec | None
    """Of the cache that it was trained from; None for a directory, or where that is gone."""

    step: int | None
    """Of the checkpoint; None for a directory, which does not say."""

    @classmethod
    def read(cls, path: Path, checkpoint: str = NEWEST) -> "DrafterSource":
        """The drafter at `path`: a run, or a directory in z-lab's layout.

        Args:
            checkpoint: of a run, as `Run.require_checkpoint` takes it.

        Raises:
            RunError: neither, or what is there cannot be used.
        """
        config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
        if "speculators_model_type" in config:
            raise RunError(
                f"{path}: a drafter in the format of speculators. Give the run, or its export by "
                "`trainer export --format dflash`."
            )
        return (
            cls._of_directory(path)
            if "hidden_size" in config
            else cls._of_run(Run(path), checkpoint)
        )

    @classmethod
    def _of_directory(cls, path: Path) -> "DrafterSource":
        where = str(path)
        config = read_config(path, where)
        settings = drafter_of(config, where)
        draft = config.get("dflash_config") or {}
        layer_ids = draft.get("target_layer_ids", config.get("target_layer_ids"))
        if not isinstance(layer_ids, list) or not all(isinstance(i, int) for i in layer_ids):
            raise RunError(f"{where}: its config.json has no list target_layer_ids.")
        tensors, _ = read_weights(path, where)
        shaped = config | {"dflash_config": {"target_layer_ids": layer_ids}}
        require_tensors(tensors, dflash_shapes(shaped), where)
        drafter = Drafter(settings, config["hidden_size"], len(layer_ids) * config["hidden_size"])
        drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        names = {"hidden_size": "hidden_size", "vocab_size": "vocab_size"}
        names["num_target_layers"] = "num_hidden_layers"
        sizes = {ours: config[name] for name, ours in names.items() if name in config}
        return cls(where, drafter, tuple(layer_ids), sizes, None, None)

    @classmethod
    def _of_run(cls, run: Run, checkpoint: str) -> "DrafterSource":
        config, snapshot = run.config(), run.require_checkpoint(checkpoint)
        if config.train.zero_features:
            raise RunError(
                f"{run.path}: trained with train.zero_features, for comparison only: no engine "
                "serves a drafter without the target's states."
            )
        hidden_size = snapshot.cache["hidden_size"]
        layer_ids = tuple(snapshot.cache["target_layer_ids"])
        drafter = Drafter(config.drafter, hidden_size, len(layer_ids) * hidden_size)
        weights = snapshot.drafter
        sizes, spec = {"hidden_size": hidden_size}, None
        try:
            cache = Caches(config.cache.paths)
            cache.require_same(snapshot.cache, str(run.path), same_samples=False)
        except DraftCacheError as error:
            if "projection" in snapshot.cache:  # its matrix is in the cache alone
                raise
            logger.warning(
                "the target is compared with the drafter's by its hidden size alone, and the "
                "cache's template arguments are not known: %s",
                error,
            )
        else:
            weights, spec = unprojected(cache, weights), cache.spec
            sizes["num_hidden_layers"] = spec.target.num_layers
            sizes["vocab_size"] = spec.target.vocab_size
        # Rounded as an export is: the figures are those of what will be served.
        drafter.load_state_dict(
            {name: value.to(torch.bfloat16).float() for name, value in weights.items()}
        )
        return cls(str(run.path), drafter, layer_ids, sizes, spec, snapshot.step)

    def compare_weights(self, target: Path) -> None:
        """Warn where the weights in `target` are not those that the cache was captured from.

        The same model in another type or in other files is a target by right; one of the same
        sizes that was trained on is not, and nothing but its weights tells.

        Raises:
            TargetError: there are none.
        """
        if self.spec is None:
            return
        expected, found = self.spec.target.weights_sha256, weights_sha256(target)
        if found != expected:
            logger.warning(
                "%s: its weights (sha256 %s) are not those that the cache of %s was captured from "
                "(%s). If it is another model, and not the same one in other files, the figures "
                "are not those of the drafter's target.",
                target,
                found[:16],
                self.where,
                expected[:16],
            )

    def template_arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the chat template: those of the cache, but for the ones that are given."""
        of_cache = self.spec.tokens.template_arguments if self.spec else {}
        for name in sorted(given.keys() & of_cache.keys()):
            if given[name] != of_cache[name]:
                logger.warning(
                    "--template-arg %s=%s: the drafter was trained with %s",
                    name,
                    json.dumps(given[name]),
                    json.dumps(of_cache[name]),
                )
        return {**of_cache, **given}

    def require_target(self, target: Target) -> None:
        """Refuse a target of other sizes than the drafter was trained for.

        Raises:
            RunError: naming what differs.
        """
        found = {name: getattr(target.config, name) for name in self.sizes}
        wrong = [
            f"{name} {found[name]}, expected {size}"
            for name, size in self.sizes.items()
            if found[name] != size
        ]
        if self.drafter.config.mask_token_id >= target.config.vocab_size:
            wrong.append(f"no token {self.drafter.config.mask_token_id}, the drafter's mask token")
        if wrong:
            raise RunError(
                f"{target.name}: not the target of the drafter {self.where} ({'; '.join(wrong)})."
            )
