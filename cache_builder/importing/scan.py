"""The first pass over a source: every sample is read without its states, and becomes planned."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from cache_builder.config import CaptureConfig, Forward, WorkersConfig
from cache_builder.corpus import TokenizedSample
from cache_builder.id_set import IdSet
from cache_builder.importing.report import ScanReport
from cache_builder.importing.source import (
    MISMATCHES,
    Place,
    SampleSkippedError,
    SkipReason,
    SourceTokens,
    StateSource,
    StoredShape,
)
from cache_builder.plan import Plan, next_plan_id
from cache_builder.plan_writer import PlanWriter
from cache_builder.planning import StoredSamples
from cache_builder.workspace import workspace
from shared.bar import tracked
from shared.errors import DataError
from shared.layout import PLANS
from shared.location import Location
from shared.spec import CaptureSpec

_FORWARD = Forward(CaptureConfig().batch_tokens, WorkersConfig().threads)
"""A plan must say how its shards are captured. Nothing here is, unless a repair does it after a
merge."""


def find_shape(source: StateSource) -> StoredShape:
    """How the states of the first readable sample are stored. All others must be so too.

    Raises:
        DataError: no sample can be read.
    """
    report = ScanReport()
    for place in source.places():
        report.num_seen += 1
        try:
            return source.tokens(place).shape
        except SampleSkippedError as error:
            report.skip(error)
    report.require_any(str(source.root))
    raise AssertionError("a source has at least one place")


def plan_import(
    source: StateSource,
    spec: CaptureSpec,
    shape: StoredShape,
    *,
    cache: Location,
    key: str,
    stored: StoredSamples,
    tag: str,
    on_mismatch: str,
    shard_mib: float,
) -> Plan:
    """Read the tokens of all samples of `source` and write a plan of those not in `stored`.

    Raises:
        DataError: states and tokens of a sample do not belong together and `on_mismatch` is
            `stop`, a file has states of another shape, or nothing can be imported.
    """
    report = ScanReport()
    seen = IdSet()
    plans = workspace(cache) / PLANS
    writer = PlanWriter(plans, next_plan_id(plans, cache))
    try:

        def skip(place: Place, error: SampleSkippedError) -> None:
            report.skip(error)
            writer.note_drop(str(source.root / place.name), place.number, error)

        for place, found in _read(source, report, skip, on_mismatch):
            _require_shape(found.shape, shape, source.root / place.name)
            sample = TokenizedSample(
                found.token_ids.astype(np.int32),
                found.loss_mask,
                source=tag,
                file=place.pattern,
                row=place.number,
                generated_by=None,
            )
            where = f"{source.root / place.name}"
            try:
                _check(found, sample, seen, spec.target.vocab_size, where)
            except SampleSkippedError as error:
                skip(place, error)
                continue
            seen.add(identity := bytes.fromhex(sample.sample_id))
            report.keep(found, is_cached=identity in stored.ids)
            if identity not in stored.ids:
                writer.add(sample)
        report.require_any(str(source.root))
        return writer.commit(
            key=key,
            forward=_FORWARD,
            shard_tokens=max(1, int(shard_mib * 2**20) // spec.row_bytes_per_token),
            relies_on=stored.shard_ids if report.num_cached else (),
            report={"imported_from": str(source.root.absolute()), **report.to_dict()},
        )
    finally:
        writer.discard()


def _read(
    source: StateSource,
    report: ScanReport,
    skip: Callable[[Place, SampleSkippedError], None],
    on_mismatch: str,
) -> Iterator[tuple[Place, SourceTokens]]:
    for place in tracked(source.places(), "read", "sample"):
        report.num_seen += 1
        try:
            yield place, source.tokens(place)
        except SampleSkippedError as error:
            if error.reason in MISMATCHES and on_mismatch == "stop":
                raise DataError(
                    f"{error.detail}. States and tokens may be shifted in other files too: find "
                    "out why, or count and leave out such samples with --skip-mismatched."
                ) from None
            skip(place, error)


def _require_shape(found: StoredShape, expected: StoredShape, path: Path) -> None:
    if found != expected:
        raise DataError(
            f"{path}: {found.num_stored} states of {found.hidden_size} values as {found.dtype} per "
            f"token, but the first file has {expected.num_stored} of {expected.hidden_size} as "
            f"{expected.dtype}. The directory holds two captures: import them apart."
        )


def _check(
    found: SourceTokens, sample: TokenizedSample, seen: IdSet, vocab_size: int, where: str
) -> None:
    ids, mask = found.token_ids, found.loss_mask
    if len(outside := np.flatnonzero((ids < 0) | (ids >= vocab_size))):
        raise SampleSkippedError(
            SkipReason.ID_OUT_OF_RANGE,
            f"{where}: id {ids[outside[0]]} at position {outside[0]}, expected 0 to "
            f"{vocab_size - 1}",
        )
    if not (mask[:-1] & mask[1:]).any():  # a block goes from a supervised token to the next ones
        raise SampleSkippedError(
            SkipReason.TOO_SHORT, f"{where}: no two adjacent supervised tokens in {len(mask)}"
        )
    if bytes.fromhex(sample.sample_id) in seen:
        raise SampleSkippedError(SkipReason.DUPLICATE, f"{where}: sample {sample.sample_id}")
