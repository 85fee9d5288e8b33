"""Records and manifests: what they hold, and every way in which they can be wrong."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import CacheError, CacheIncompatibleError, DraftCacheError
from shared.local_storage import LocalStorage
from shared.manifest import (
    LayerStatistics,
    Manifest,
    ShardRecord,
    StoredFile,
    Totals,
    check_shard_id,
)
from tests.test_shared.mutate import json_values, mutated

RECORD = ShardRecord(
    shard_id="0001-00042",
    fingerprint="a" * 64,
    num_samples=2,
    num_tokens=70,
    num_supervised=12,
    num_outliers=1,
    calibration="b" * 64,
    files={
        "hidden_states/c/0/0/0": StoredFile(size=1000, sha256="c" * 64),
        "zarr.json": StoredFile(size=234, sha256="d" * 64),
    },
    sources=("chat", "code"),
    layers=(LayerStatistics(rms=1.5, max_abs=29_056.0, relative_error=0.018),),
    quarantined={"e" * 32: "states of block 2 are not finite"},
)
MANIFEST = Manifest(
    generation=3,
    fingerprint="a" * 64,
    records={"0001-00042": "f" * 64, "0001-00007": "0" * 64},
    index=StoredFile(size=55, sha256="1" * 64),
    sources=("chat", "code"),
    totals=Totals(num_shards=2, num_samples=4, num_tokens=140),
)

Document = ShardRecord | Manifest
each = pytest.mark.parametrize("document", [RECORD, MANIFEST], ids=["record", "manifest"])


@each
def test_what_was_written_reads_back_from_json(document: Document) -> None:
    text = json.dumps(document.to_dict(), allow_nan=False)
    assert type(document).from_dict(json.loads(text), "here") == document


def test_stored_bytes_are_those_of_all_files() -> None:
    assert RECORD.stored_bytes == 1234


def test_shard_ids_of_a_manifest_are_sorted() -> None:
    """The index refers to them by position."""
    assert MANIFEST.shard_ids == ["0001-00007", "0001-00042"]


@each
def test_another_version_is_refused_before_anything_else(document: Document) -> None:
    with pytest.raises(
        CacheIncompatibleError,
        match=r"^here: format version 1, this version reads 2\. Use the version of draftcache",
    ):
        type(document).from_dict({"format_version": 1, "new_field": True}, "here")


@each
@pytest.mark.parametrize("value", [None, [], "text", 3])
def test_what_is_no_table_is_refused(document: Document, value: Any) -> None:
    with pytest.raises(CacheError, match=r"^here: expected a table\. The file is damaged\."):
        type(document).from_dict(value, "here")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"num_samples": -1}, "shard 0001-00042: negative count", id="count"),
        pytest.param({"num_samples": 2.0}, "num_samples: expected int, got 2.0", id="float"),
        pytest.param({"fingerprint": "A" * 64}, "fingerprint: 'AAAA", id="upper-case-digest"),
        pytest.param({"fingerprint": "a" * 63}, "fingerprint: 'aaaa", id="short-digest"),
        pytest.param({"fingerprint": "a" * 64 + "\n"}, "fingerprint: 'aaaa", id="digest-and-line"),
        pytest.param({"calibration": "../head"}, "calibration: '../head' is not", id="calibration"),
        pytest.param(
            {"files": {"a": {"size": -1, "sha256": "a" * 64}}}, "size must not be", id="size"
        ),
        pytest.param(
            {"files": {"a": {"size": 1, "sha256": "x"}}}, "'x' is not a sha256", id="file-digest"
        ),
        pytest.param({"layers": [{"rms": 1.0}]}, "layers[0]: missing key 'max_abs'", id="layer"),
        pytest.param({"extra": 1}, "unknown key 'extra'", id="unknown-key"),
    ],
)
def test_a_record_with_a_wrong_field_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheError) as caught:
        ShardRecord.from_dict(RECORD.to_dict() | change, "here")
    assert str(caught.value).startswith("here: ")
    assert message in str(caught.value)
    assert str(caught.value).endswith("The file is damaged.")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"generation": 0}, "generation must be positive, got 0", id="generation"),
        pytest.param({"records": {"0001-00042": "x"}}, "record 0001-00042: 'x' is", id="digest"),
        pytest.param({"fingerprint": ""}, "fingerprint: '' is not a sha256", id="fingerprint"),
        pytest.param({"totals": {"samples": 1}}, "totals: unknown key 'samples'", id="totals"),
    ],
)
def test_a_manifest_with_a_wrong_field_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheError) as caught:
        Manifest.from_dict(MANIFEST.to_dict() | change, "here")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"generation": 4}, id="generation"),
        pytest.param({"fingerprint": "9" * 64}, id="fingerprint"),
        pytest.param({"records": {"0001-00042": "f" * 64}}, id="one-record-less"),
        pytest.param({"sources": ["code", "chat"]}, id="sources"),
        pytest.param({"totals": {"num_shards": 2, "num_samples": 4}}, id="totals"),
        pytest.param({"sha256": "0" * 64}, id="digest"),
        pytest.param({"sha256": None}, id="no-digest"),
    ],
)
def test_a_manifest_changed_in_a_way_that_still_fits_is_refused(change: dict[str, Any]) -> None:
    """Nothing else covers the manifest, so it covers itself."""
    with pytest.raises(CacheError, match=r"^here: states sha256 .* It was changed or damaged"):
        Manifest.from_dict(MANIFEST.to_dict() | change, "here")


NAMES_THAT_LEAVE = [
    "../0001-00001",
    "0001-00001/..",
    "/etc/passwd",
    "0001-00001\n",
    "0001-00001.json",
    "0001_00001",
    "\u0660\u0660\u0660\u0661-00001",
    "",
    ".",
]


@pytest.mark.parametrize("name", NAMES_THAT_LEAVE, ids=repr)
def test_a_shard_id_that_is_no_plain_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not of the form 0001-00042"):
        check_shard_id(name)
    with pytest.raises(CacheError, match="is not of the form"):
        ShardRecord.from_dict(RECORD.to_dict() | {"shard_id": name}, "here")
    with pytest.raises(CacheError, match="is not of the form"):
        Manifest.from_dict(MANIFEST.to_dict() | {"records": {name: "a" * 64}}, "here")


@pytest.mark.parametrize("name", ["0001-00042", "12345-123456", "0000-00000"])
def test_a_plain_shard_id_is_accepted(name: str) -> None:
    assert check_shard_id(name) == name


@pytest.mark.parametrize(
    "name",
    ["../x", "a/../../x", "/a", "a//b", "a/", "a\\b", "A", "a.b", ".json", "a.json/b", "a\n", ""],
    ids=repr,
)
def test_a_file_name_that_could_lead_elsewhere_is_refused(name: str) -> None:
    files = {name: {"size": 1, "sha256": "a" * 64}}
    with pytest.raises(CacheError, match=r"file name .* is not allowed"):
        ShardRecord.from_dict(RECORD.to_dict() | {"files": files}, "here")


@pytest.mark.parametrize("key", ["../x", "a/../../x", "/etc/passwd", "", "records/.."], ids=repr)
def test_storage_opens_nothing_outside_the_cache(tmp_path: Path, key: str) -> None:
    storage = LocalStorage(tmp_path)
    for use in (storage.path, storage.exists, storage.names, storage.read):
        with pytest.raises(CacheError, match="leaves the cache"):
            use(key)
    with pytest.raises(CacheError, match="leaves the cache"):
        storage.read_range(key, 0, 1)


@each
def test_no_json_makes_from_dict_fail_in_another_way(document: Document) -> None:
    @settings(max_examples=200)
    @given(json_values | mutated(document.to_dict()))
    def check(fields: Any) -> None:
        try:
            found = type(document).from_dict(fields, "here")
        except DraftCacheError:
            return
        assert type(document).from_dict(found.to_dict(), "here") == found

    check()


@given(st.text())
def test_no_text_is_a_shard_id_with_a_separator(text: str) -> None:
    try:
        check_shard_id(text)
    except ValueError:
        return
    assert not set(text) & set("/\\.\0\n")


def test_records_are_values() -> None:
    assert replace(RECORD, num_tokens=71) != RECORD
