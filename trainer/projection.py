"""Making a projection of a pilot's `fc`, and fitting an `fc` to one.

Directions are compared where every channel has been divided by its RMS: a few channels are a
hundred times louder than the rest, and in the states' own units would be all that counts.

D hidden size   F values of all tapped blocks   R rank   T tokens
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shared.errors import ConfigError, NonFiniteError, RunError
from shared.projection import Projection, Provenance
from trainer.caches import Caches, generations_of
from trainer.run import Run
from trainer.session import Session

_DEPENDENT = 1e-10
"""Share of the largest eigenvalue below which rows count as linearly dependent."""

_GRAM_TOKENS = 4096
"""Tokens whose products are summed in float32; the sums of these are float64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectionSettings:
    """What is asked of a projection."""

    rank: int | None = None
    """Values of a projected token; None takes `rank_factor`."""

    rank_factor: float = 1.0
    """Rank over hidden size."""

    is_orthonormal: bool = True
    """Make the rows orthogonal, of one length. The row space, and so what can be learned, is the
    same."""

    is_principal: bool = False
    """Principal directions of the states instead of the pilot's `fc`."""

    num_tokens: int = 65_536
    """Tokens of the pilot's cache that RMS and covariance are taken of."""

    def resolve_rank(self, hidden_size: int, num_features: int) -> int:
        """The rank asked for.

        Raises:
            ConfigError: it is below the hidden size, or not below that of the states.
        """
        rank = self.rank if self.rank is not None else int(self.rank_factor * hidden_size)
        if not hidden_size <= rank < num_features:
            raise ConfigError(
                f"rank {rank}: must be at least the hidden size, {hidden_size}, since fc gives "
                f"that many values, and below the {num_features} values of the states."
            )
        return rank


@dataclass(frozen=True, eq=False, slots=True)
class _Statistics:
    rms_F: Tensor
    """float64, positive."""

    covariance_FF: Tensor | None
    """float64, of the channels over their RMS; None where it was not asked for."""

    num_tokens: int


def make_projection(run: Run, settings: ProjectionSettings) -> Projection:
    """The projection that the newest checkpoint of `run`, a pilot, gives.

    Raises:
        RunError: there is no checkpoint, its features were not the states themselves, or its `fc`
            has rows that depend on each other.
        NonFiniteError: its `fc` or the states of its cache are not finite.
        ConfigError: the rank is out of range.
    """
    snapshot, config = run.require_checkpoint(), run.config()
    session = Session.open(config, generations=generations_of(snapshot.cache))
    session.cache.require_same(snapshot.cache, str(run.path))
    spec = session.cache.spec
    if spec.projection is not None:
        raise RunError(
            f"{run.path}: trained from projected states; the rows of its fc are those of that "
            "projection. Take a pilot that was trained from the states themselves."
        )
    if config.train.zero_features and not settings.is_principal:
        raise RunError(
            f"{run.path}: trained with train.zero_features, so its fc has learned nothing. Train "
            "the pilot without it."
        )
    rank = settings.resolve_rank(spec.target.hidden_size, spec.num_features)
    num_directions = rank if settings.is_principal else rank - spec.target.hidden_size
    found = _measure(session, settings.num_tokens, with_covariance=num_directions > 0)
    fc_DF = snapshot.drafter["fc.weight"].double()
    if not bool(fc_DF.isfinite().all()):
        raise NonFiniteError(f"{run.path}: the fc of step {snapshot.step} is not finite.")
    if settings.is_principal:
        rows_RF, fc_DF = _principal(found, rank), _last_block(found, spec.target.hidden_size)
    else:
        rows_RF = _pilot_rows(fc_DF, found, num_directions, settings, str(run.path))
    if settings.is_orthonormal or settings.is_principal:
        rows_RF = rows_RF * _length(found, rank)
    matrix_RF = (rows_RF / found.rms_F).float()
    start_DR, _ = fit_factor(fc_DF, matrix_RF, found.rms_F)
    projection = Projection(
        matrix_RF,
        start_DR,
        found.rms_F.float(),
        Provenance(
            kind="principal" if settings.is_principal else "pilot",
            is_orthonormal=settings.is_principal or settings.is_orthonormal,
            target_name=str(session.cache.parts[0].description["target_name"]),
            config_sha256=spec.target.config_sha256,
            weights_sha256=spec.target.weights_sha256,
            target_layer_ids=spec.target_layer_ids,
            hidden_size=spec.target.hidden_size,
            rank=rank,
            step=None if settings.is_principal else snapshot.step,
            fingerprint=spec.fingerprint,
            num_tokens=found.num_tokens,
        ),
    )
    return Projection.from_bytes(projection.to_bytes(), str(run.path))  # what readers refuse


def fit_factor(fc_DF: Tensor, matrix_RF: Tensor, rms_F: Tensor) -> tuple[Tensor, float]:
    """What a fusion layer becomes behind a projection: the nearest one, by least squares.

    Returns:
        The factor, float32 [D, R], and the share of `fc_DF` that it cannot give: the L2 norm of
        what is left over that of the whole, every channel weighed by its RMS.

    Raises:
        RunError: the rows of the matrix depend on each other.
    """
    fc_DF, rows_RF = fc_DF.double() * rms_F.double(), matrix_RF.double() * rms_F.double()
    factor_RD, info = torch.linalg.solve_ex(rows_RF @ rows_RF.T, rows_RF @ fc_DF.T)
    if int(info):
        raise RunError(
            "the rows of the projection depend on each other: make it again from another pilot."
        )
    factor_DR = factor_RD.T.float().contiguous()
    left = (fc_DF - factor_DR.double() @ rows_RF).norm() / fc_DF.norm().clamp_min(1e-30)
    return factor_DR, float(left)


def unprojected(cache: Caches, drafter: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights `drafter` with an `fc` that reads the blocks' own states, float32.

    Behind a projection that is the product of the trained factor with its matrix: what a server
    multiplies with, since it knows no projection.
    """
    projection = cache.projection()
    if projection is None:
        return drafter
    return {**drafter, "fc.weight": drafter["fc.weight"].float() @ projection.matrix_RF}


def rows(projection: Projection) -> list[tuple[str, str]]:
    """What was made, as a table of names and values."""
    made = projection.provenance
    full = made.hidden_size * len(made.target_layer_ids)
    origin = "principal directions" if made.step is None else f"fc after {made.step:,} steps"
    return [
        ("made of", origin),
        ("rows", "orthonormal" if made.is_orthonormal else "as they were"),
        ("values of a token", f"{made.rank:,} of {full:,} ({made.rank / full:.3f})"),
        ("target", f"{made.target_name}, blocks {list(made.target_layer_ids)}"),
        ("statistics", f"{made.num_tokens:,} tokens"),
    ]


@torch.no_grad()
def _measure(session: Session, num_tokens: int, *, with_covariance: bool) -> _Statistics:
    """RMS and covariance over training samples spread evenly, the first token of each left out:
    its massive activations are not typical."""
    cache, device = session.cache, session.device
    size, train = cache.spec.num_features, session.split.train
    lengths = cache.index.num_tokens[train].astype("int64") - 1
    count, sum_F = 0, torch.zeros(size, dtype=torch.float64, device=device)
    square_F, product_FF = torch.zeros_like(sum_F), None
    if with_covariance:
        product_FF = torch.zeros(size, size, dtype=torch.float64, device=device)
    for position in train[_spread(lengths, num_tokens)].tolist():
        states_TLD = cache.unpack(cache.read(position))[1:, : cache.spec.num_taps]
        for states_TF in torch.split(states_TLD.flatten(1).to(device).float(), _GRAM_TOKENS):
            sum_F += states_TF.sum(0, dtype=torch.float64)
            square_F += states_TF.double().square().sum(0)
            if product_FF is not None:
                product_FF += states_TF.T @ states_TF
            count += len(states_TF)
    if not count or not bool(square_F.isfinite().all()):
        raise NonFiniteError(
            f"{cache}: its states have no finite RMS over {count:,} tokens. Run `cache-builder "
            "verify --deep`, then `cache-builder repair`."
        )
    mean_F = sum_F / count
    rms_F = (square_F / count).sqrt().clamp_min(1e-6)
    if product_FF is not None:
        product_FF = (product_FF / count - mean_F.outer(mean_F)) / rms_F.outer(rms_F)
    return _Statistics(rms_F.cpu(), product_FF, count)


def _spread(lengths: npt.NDArray[np.int64], num_tokens: int) -> npt.NDArray[np.int64]:
    """Samples of about `num_tokens` tokens, at equal distances; all of them where they have fewer.

    A cache has samples of one length side by side, so none of its parts stands for the whole.
    """
    count = min(-(-num_tokens * len(lengths) // max(int(lengths.sum()), 1)), len(lengths))
    return (2 * np.arange(count) + 1) * len(lengths) // (2 * count)


def _pilot_rows(
    fc_DF: Tensor, found: _Statistics, num_directions: int, settings: ProjectionSettings, where: str
) -> Tensor:
    """Rows of the pilot's `fc`, then leading directions of what they leave; over the RMS."""
    rows_DF = fc_DF * found.rms_F
    values_D, vectors_DD = torch.linalg.eigh(rows_DF @ rows_DF.T)
    if not bool(values_D[0] > _DEPENDENT * values_D[-1]):
        raise RunError(
            f"{where}: rows of its fc depend on each other (eigenvalues from {values_D[0]:.3g} to "
            f"{values_D[-1]:.3g}). Train the pilot for longer, or with drafter.fitted_start."
        )
    # Of all orthonormal bases the one nearest to the rows: each row stays about what it was.
    basis_DF = vectors_DD * values_D.rsqrt() @ vectors_DD.T @ rows_DF
    if settings.is_orthonormal:
        rows_DF = basis_DF
    if not num_directions:
        return rows_DF
    return torch.cat([rows_DF, _principal(found, num_directions, without_DF=basis_DF)])


def _length(found: _Statistics, rank: int) -> float:
    """Of the rows, over the RMS. It decides how fast the drafter's `fc` learns behind them.

    A step of Adam moves every weight by the learning rate, and so the sum over F channels by that
    times F times their mean RMS. Behind rows of this length, which hold most of the variance (F in
    all), R features do the same. With length 1 the demo's drafter lost 5 % of acceptance length to
    it: 1.286 at rank D, against 1.358 with this length and 1.341 on the states themselves.
    """
    return float(found.rms_F.mean()) * math.sqrt(len(found.rms_F) / rank)


def _principal(found: _Statistics, count: int, without_DF: Tensor | None = None) -> Tensor:
    """Leading eigenvectors of the covariance, as rows; of what is left outside a row space."""
    assert found.covariance_FF is not None
    left_FF = found.covariance_FF
    if without_DF is not None:
        without_DF = without_DF.to(left_FF.device)
        left_FF = left_FF - without_DF.T @ (without_DF @ left_FF)
        left_FF = left_FF - (left_FF @ without_DF.T) @ without_DF
    vectors_FF: Tensor = torch.linalg.eigh(left_FF).eigenvectors
    return vectors_FF[:, -count:].flip(1).T.cpu()


def _last_block(found: _Statistics, hidden_size: int) -> Tensor:
    """What `fc` starts from without a pilot: the last tapped block, every channel over its RMS."""
    fc_DF = torch.zeros(hidden_size, len(found.rms_F), dtype=torch.float64)
    fc_DF[:, -hidden_size:] = torch.diag(1 / found.rms_F[-hidden_size:])
    return fc_DF
