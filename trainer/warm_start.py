"""First weights from a drafter in z-lab's layout: a published one, or an earlier export."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shared import config as configs
from shared.errors import RunError
from trainer.drafter_directory import read_config, read_weights, require_tensors
from trainer.exporting.zlab import dflash_config, dflash_shapes, drafter_of
from trainer.projection import fit_factor
from trainer.session import Session, read_target_config

logger = logging.getLogger(__name__)

_MAX_LEFT = 0.5
_MUCH_LEFT = 0.01
"""Shares of an `fc` outside the projection of a cache: beyond the first it is refused, beyond the
second warned of. Rounding an export to bfloat16 gives about 0.002."""

_OF_TARGET = ("hidden_size", "vocab_size", "num_target_layers")
_FREE = ("initializer_range", "fitted_start", "partial_rotary_factor")
"""Settings of a drafter that make no other one of it."""


@dataclass(frozen=True, eq=False, slots=True)
class WarmStart:
    """Weights that fit the drafter of a session."""

    path: Path
    weights_sha256: str
    """Of the file; of the files' digests where there are several."""

    tensors: dict[str, Tensor]
    left_out: float | None = None
    """Share of the `fc` there that lies outside the cache's projection; None without one."""

    @classmethod
    def read(cls, session: Session) -> "WarmStart | None":
        """The drafter at `train.init_from`; None where that is not set.

        Raises:
            RunError: there is none, or it is another drafter than is asked for: names what differs.
        """
        path = session.config.train.init_from
        if path is None:
            return None
        where = f"train.init_from {path}"
        _require_same_drafter(read_config(path, where), session, where)
        tensors, digest = read_weights(path, where)
        shapes = dflash_shapes(dflash_config(session.config.drafter, session.cache, {}))
        require_tensors(tensors, shapes, where)
        if (projection := session.cache.projection()) is None:
            return cls(path, digest, tensors)
        factor_DR, left = fit_factor(
            tensors["fc.weight"], projection.matrix_RF, projection.channel_rms_F
        )
        if not left <= _MAX_LEFT:
            raise RunError(
                f"{where}: the projection of {session.cache} does not hold its fc: "
                f"{100 * left:.1f} % of it (L2 norm, channels over their RMS) lie outside, at most "
                f"{100 * _MAX_LEFT:.0f} % may. Make the projection of this drafter, or start "
                "without it."
            )
        return cls(path, digest, tensors | {"fc.weight": factor_DR}, left)

    def load(self, session: Session) -> None:
        """Put the weights into the session's drafter: bit for bit, but for an `fc` that a
        projection is in front of."""
        session.drafter.load_state_dict({name: t.float() for name, t in self.tensors.items()})
        logger.info(
            "the weights start from %s (sha256 %s); drafter.fitted_start does not apply",
            self.path,
            self.weights_sha256[:16],
        )
        if self.left_out is not None:
            level = logging.WARNING if self.left_out > _MUCH_LEFT else logging.INFO
            logger.log(
                level,
                "its fc is taken as far as the projection of the cache holds it: %.2f %% of it "
                "(L2 norm, channels over their RMS) lie outside",
                100 * self.left_out,
            )

    def describe(self) -> dict[str, Any]:
        """What a checkpoint remembers."""
        told: dict[str, Any] = {"path": str(self.path), "weights_sha256": self.weights_sha256}
        return told if self.left_out is None else told | {"fc_left_out": self.left_out}


def _require_same_drafter(config: dict[str, Any], session: Session, where: str) -> None:
    ours = dflash_config(session.config.drafter, session.cache, read_target_config(session.cache))
    lines = configs.differences(
        _settings(ours, where), _settings(config, where), ("asked for", "there")
    )
    if lines:
        raise RunError(
            f"{where}: another drafter than is asked for ({'; '.join(lines)}). Give its settings, "
            "and a cache of its target with its layers; or start without it."
        )


def _settings(config: dict[str, Any], where: str) -> dict[str, Any]:
    """What must be equal: of the drafter, its taps, and the sizes of its target."""
    drafter = configs.to_dict(drafter_of(config, where))
    return {
        **{f"drafter.{name}": drafter[name] for name in drafter if name not in _FREE},
        "target_layer_ids": (config.get("dflash_config") or {}).get(
            "target_layer_ids", config.get("target_layer_ids")
        ),
        **{name: config.get(name) for name in _OF_TARGET},
    }
