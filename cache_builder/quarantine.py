"""Samples whose states could not be used: which they are now, whatever happened in between."""

from collections.abc import Container, Iterable

from shared.manifest import ShardRecord


def quarantined_samples(records: Iterable[ShardRecord], stored: Container[bytes]) -> dict[str, str]:
    """Id to reason of the samples that some record could not store and no shard has.

    Records are never changed: a sample that was captured at a later try stays in the record of the
    earlier one, and counts no more. One that failed twice counts once, with the latest reason.

    Args:
        records: in the order of their shard ids.
        stored: ids of the samples in their shards.
    """
    return {
        sample_id: reason
        for record in records
        for sample_id, reason in record.quarantined.items()
        if bytes.fromhex(sample_id) not in stored
    }
