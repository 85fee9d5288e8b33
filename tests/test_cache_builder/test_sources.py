"""Tables and saved datasets give the samples that JSON lines give, or say why not."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cache_builder import hub, planning
from cache_builder.build import build
from cache_builder.config import BuildConfig, SourceConfig
from cache_builder.rows import choose_below, count_rows, digest_file, read_rows
from cache_builder.sources import DataFile, find_files
from shared.cache import Cache
from shared.errors import DataError
from tests.conftest import conversations, write_jsonl

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")

MakeBuild = Callable[..., BuildConfig]
Write = Callable[[Path, list[dict[str, Any]]], str]


def table(rows: list[dict[str, Any]]) -> Any:
    names = dict.fromkeys(name for row in rows for name in row)
    return arrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])


def write_parquet(directory: Path, rows: list[dict[str, Any]]) -> str:
    path = directory / "rows.parquet"
    parquet.write_table(table(rows), path, row_group_size=7)
    return str(path)


def write_saved(directory: Path, rows: list[dict[str, Any]]) -> str:
    path = directory / "saved"
    data = datasets.Dataset(table(rows))
    data.save_to_disk(path, num_shards=min(3, len(rows)))
    return str(path)


def write_hub_layout(directory: Path, rows: list[dict[str, Any]]) -> str:
    path = directory / "repository"
    (path / "data").mkdir(parents=True)
    (path / "README.md").write_text(
        "---\nconfigs:\n- config_name: chats\n  data_files:\n"
        "  - split: train\n    path: data/train-*\n  - split: test\n    path: data/test-*\n---\n"
    )
    parquet.write_table(table(rows), path / "data" / "train-0.parquet")
    parquet.write_table(table(rows[:1]), path / "data" / "test-0.parquet")
    return f"hub:{path}:chats:train"


WRITERS = [
    pytest.param(write_parquet, id="parquet"),
    pytest.param(write_saved, id="saved"),
    pytest.param(write_hub_layout, id="hub"),
]


@pytest.fixture(autouse=True)
def _cache_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache-of-datasets")
    hub.fetch_dataset.cache_clear()
    datasets.disable_progress_bars()
    yield
    hub.fetch_dataset.cache_clear()


def read_all(source: str) -> list[Any]:
    return [row for file in find_files(source) for _, row in read_rows(file)]


# --- rows


@pytest.mark.parametrize("write", WRITERS)
def test_rows_are_those_that_were_written_in_their_order(write: Write, tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    rows: list[dict[str, Any]] = [
        *conversations(range(20)),
        {
            "messages": [
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "4"},
                {"role": "assistant", "content": "4", "reasoning_content": "as it says"},
            ],
            "generated_by": "tiny",
        },
    ]
    assert read_all(write(tmp_path, rows)) == rows


@pytest.mark.parametrize("write", WRITERS)
def test_tokens_and_text_are_read_from_tables(write: Write, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
        {"text": "once"},
    ]
    assert read_all(write(tmp_path, rows)) == rows


def test_a_field_that_only_other_rows_have_is_absent_at_every_depth(tmp_path: Path) -> None:
    """A table unites the fields of all rows, and would have null arguments in every tool call."""
    rows = [
        {"messages": [{"role": "assistant", "calls": [{"name": "add", "with": {"a": 1}}]}]},
        {"messages": [{"role": "assistant", "calls": [{"name": "now", "with": {"zone": "z"}}]}]},
        {"messages": [{"role": "assistant", "calls": []}], "source": "s"},
    ]
    path = write_parquet(tmp_path, rows)
    stored = parquet.read_table(path).to_pylist()
    assert stored[0]["messages"][0]["calls"][0]["with"] == {"a": 1, "zone": None}
    assert read_all(path) == rows


def test_columns_of_json_and_of_maps_are_read(tmp_path: Path) -> None:
    tools = [{"name": "add", "b": {"c": None}}, {"name": "now", "b": [1]}]
    features = datasets.Features({"tools": datasets.List(datasets.Json())})
    datasets.Dataset.from_dict({"tools": [tools]}, features=features).save_to_disk(tmp_path / "s")
    assert read_all(str(tmp_path / "s")) == [{"tools": tools}]
    kind = arrow.map_(arrow.string(), arrow.bool_())
    column = arrow.array([[("enable_thinking", False)], None], kind)
    parquet.write_table(
        arrow.table({"chat_template_kwargs": column, "n": [1, 2]}), tmp_path / "m.parquet"
    )
    assert read_all(str(tmp_path / "m.parquet")) == [
        {"chat_template_kwargs": {"enable_thinking": False}, "n": 1},
        {"n": 2},
    ]


def test_rows_are_chosen_among_those_whose_maps_have_keys_of_bytes(tmp_path: Path) -> None:
    kind = arrow.map_(arrow.binary(), arrow.int64())
    column = arrow.array([[(b"k", i), (b"\xff", 0)] for i in range(40)], kind)
    parquet.write_table(arrow.table({"m": column}), tmp_path / "m.parquet")
    files = find_files(str(tmp_path / "m.parquet"))
    below = choose_below(files, weight=1.0, limit=10)
    rows = [row for file in files for _, row in read_rows(file, below=below)]
    assert sum(isinstance(row, dict) for row in rows) == 10


@pytest.mark.parametrize("write", WRITERS)
def test_weight_and_limit_take_the_same_rows_of_a_table_at_every_reading(
    write: Write, tmp_path: Path
) -> None:
    files = find_files(write(tmp_path, conversations(range(60))))

    def taken(**rules: Any) -> list[int]:
        below = choose_below(files, **rules)
        rows = [row for file in files for _, row in read_rows(file, below=below)]
        return [i for i, row in enumerate(rows) if isinstance(row, dict)]

    ten = taken(weight=1.0, limit=10)
    assert len(ten) == 10
    assert taken(weight=1.0, limit=10) == ten
    assert set(taken(weight=1.0, limit=4)) < set(ten)
    assert len(taken(weight=1.0, limit=1000)) == 60
    assert 15 < len(taken(weight=0.5, limit=None)) < 45
    assert sum(map(count_rows, files)) == 60


def test_a_limit_holds_no_more_hashes_than_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", [{"n": n % 150} for n in range(300)])
    files = find_files(str(file))
    expected = choose_below(files, weight=1.0, limit=20)
    monkeypatch.setattr("cache_builder.rows._SPARE_HASHES", 0)
    assert choose_below(files, weight=1.0, limit=20) == expected
    rows = [row for _, row in read_rows(files[0], below=expected) if isinstance(row, dict)]
    assert len({row["n"] for row in rows}) == 20


# --- builds


@pytest.mark.parametrize("write", WRITERS)
def test_a_table_gives_the_cache_that_json_lines_give(
    write: Write, tiny_build: MakeBuild, tmp_path: Path
) -> None:
    rows = conversations(range(12))
    lines = build(tiny_build(tmp_path / "a", data=[write_jsonl(tmp_path / "x.jsonl", rows)]))
    source = write(tmp_path, rows)
    table = build(tiny_build(tmp_path / "b", data=[source]))
    assert table.manifest.records.keys() == lines.manifest.records.keys()
    first, second = Cache(tmp_path / "a").index, Cache(tmp_path / "b").index
    assert first.sample_ids.tolist() == second.sample_ids.tolist()
    # Read again: nothing to do. Read with more rows: only those are captured.
    assert build(tiny_build(tmp_path / "b", data=[source])).num_new_shards == 0
    shutil.rmtree(tmp_path / "repository", ignore_errors=True)
    shutil.rmtree(tmp_path / "saved", ignore_errors=True)
    hub.fetch_dataset.cache_clear()  # as another process
    more = build(tiny_build(tmp_path / "b", data=[write(tmp_path, conversations(range(15)))]))
    assert more.plan.description["report"]["already_cached"] == 12
    assert len(more.plan) == 3


@pytest.mark.parametrize("write", WRITERS)
def test_the_plan_names_file_row_and_source_of_a_table(
    write: Write, tiny_build: MakeBuild, tmp_path: Path
) -> None:
    rows = [{k: v for k, v in row.items() if k != "source"} for row in conversations(range(9))]
    source = write(tmp_path, rows)
    report = build(tiny_build(tmp_path / "cache", data=[source]))
    places = {report.plan.provenance(i) for i in range(9)}
    files = [str(file) for file in find_files(source)]
    assert {file for file, _, _ in places} == set(files)
    counts = {file: sum(place[0] == file for place in places) for file in files}
    assert {(file, row) for file, row, _ in places} == {
        (file, row) for file in files for row in range(1, counts[file] + 1)
    }
    tag = {"rows.parquet": "rows", "saved": "saved"}.get(Path(source).name, "repository")
    assert {tag for _, _, tag in places} == {tag}
    if source.startswith("hub:"):
        assert files[0].startswith(f"{source}/")


@pytest.mark.parametrize("write", WRITERS)
def test_a_table_that_changes_between_hashing_and_reading_is_refused(
    write: Write, tiny_build: MakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path, conversations(range(6)))
    original, seen = planning.digest_file, []

    def changed(file: Path) -> str:
        digest = original(file)
        if not seen:  # once, behind the first file that is hashed
            file.write_bytes(file.read_bytes()[:-1] + b"\n")
            seen.append(file)
        return digest

    monkeypatch.setattr(planning, "digest_file", changed)
    with pytest.raises(DataError, match=r"changed while it was read|cannot be read after row"):
        build(tiny_build(tmp_path / "cache", data=[source]))


def test_every_byte_of_a_table_counts(tmp_path: Path) -> None:
    (file,) = find_files(write_parquet(tmp_path, conversations(range(20))))
    digest = digest_file(file.path)
    assert len(list(read_rows(file, digest=digest))) == 20
    with pytest.raises(DataError, match=r"rows\.parquet: changed while it was read"):
        list(read_rows(file, digest="0" * 64))


# --- directories


def test_a_directory_gives_all_files_of_known_kinds(tmp_path: Path) -> None:
    write_parquet(tmp_path, conversations(range(2)))
    write_jsonl(tmp_path / "a.jsonl", conversations(range(3)))
    (tmp_path / "notes.txt").write_text("not data")
    assert [file.path.name for file in find_files(str(tmp_path))] == ["a.jsonl", "rows.parquet"]
    assert [file.tag for file in find_files(str(tmp_path))] == ["a", "rows"]
    assert len(read_all(str(tmp_path / "*.parquet"))) == 2


def test_what_a_directory_passes_over_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of the data may be an array in `chats.json`, or a directory below."""
    write_jsonl(tmp_path / "a.jsonl", conversations(range(3)))
    (tmp_path / "README.md").write_text("what it is")
    (tmp_path / ".hidden").write_text("")
    find_files(str(tmp_path))
    assert caplog.messages == []
    (tmp_path / "chats.json").write_text("[]")
    (tmp_path / "more").mkdir()
    find_files(str(tmp_path))
    find_files(str(tmp_path))
    (line,) = caplog.messages
    assert f"{tmp_path}: 2 entries are passed over (chats.json, more/): " in line


def test_what_datasets_caches_beside_a_saved_dataset_is_not_read(tmp_path: Path) -> None:
    source = write_saved(tmp_path, conversations(range(9)))
    loaded = datasets.load_from_disk(source)
    loaded.map(lambda row: row, load_from_cache_file=False)
    assert list(Path(source).glob("cache-*.arrow"))
    assert len(read_all(source)) == 9


def test_a_selection_is_saved_as_its_rows(tmp_path: Path) -> None:
    rows = conversations(range(9))
    datasets.Dataset.from_list(rows).select([5, 2]).save_to_disk(tmp_path / "s")
    assert read_all(str(tmp_path / "s")) == [rows[5], rows[2]]


def test_a_saved_dataset_of_splits_is_named_by_split(tmp_path: Path) -> None:
    rows = conversations(range(4))
    splits = {name: datasets.Dataset.from_list(rows) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "s")
    with pytest.raises(DataError, match=r"2 splits \(test, train\)\. Name the directory of one"):
        find_files(str(tmp_path / "s"))
    assert read_all(str(tmp_path / "s" / "train")) == rows


def damage_state(saved: Path, **fields: Any) -> None:
    state = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps({**state, **fields}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(
            lambda saved: next(saved.glob("data-00001*")).unlink(),
            r"data-00001-of-00003\.arrow: missing; state\.json lists 3 files",
            id="file",
        ),
        pytest.param(
            lambda saved: damage_state(saved, _data_files=None), "expected the state", id="state"
        ),
        pytest.param(
            lambda saved: damage_state(saved, _indices_data_files=[{"filename": "i.arrow"}]),
            "a selection of rows as indices",
            id="indices",
        ),
    ],
)
def test_a_saved_dataset_that_is_not_whole_is_refused(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    source = write_saved(tmp_path, conversations(range(9)))
    damage(Path(source))
    with pytest.raises(DataError, match=message):
        find_files(source)


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_a_damaged_table_is_one_line_with_the_row(name: str, tmp_path: Path) -> None:
    rows = conversations(range(2000))
    if name.endswith(".parquet"):
        data = Path(write_parquet(tmp_path, rows)).read_bytes()
        broken = [b"PAR1", b"", data[:-9], data[:40] + b"\xff" * 4000 + data[4040:]]
    else:
        data = next(Path(write_saved(tmp_path, rows)).glob("data-00000*")).read_bytes()
        broken = [b"", b"ARROW1", data[: len(data) // 2]]
    for content in broken:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}: cannot be read after row \d+ \(") as caught:
            read_all(str(tmp_path / name))
        assert "\n" not in str(caught.value)


# --- the hub


def test_splits_and_subsets_must_be_named_where_there_are_several(tmp_path: Path) -> None:
    source = write_hub_layout(tmp_path, conversations(range(3)))
    root = source.removesuffix(":chats:train")
    assert len(read_all(f"{root}:train")) == 3
    assert len(read_all(f"{root}:test")) == 1
    with pytest.raises(DataError, match=r"it has the splits 'train', 'test'\. Name one"):
        find_files(root)
    with pytest.raises(DataError, match=r"it has the splits 'train', 'test'\. Name one"):
        find_files(f"{root}:train[50%]")
    with pytest.raises(DataError, match=r"`datasets` cannot load it \(ValueError: BuilderConfig"):
        find_files(f"{root}:others:train")
    with pytest.raises(DataError, match=r"is a directory, which has no revisions"):
        find_files(f"{root}@main:train")


@pytest.mark.parametrize("name", ["", "a:b:c:d", "a@", ":train"])
def test_a_name_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"expected hub:OWNER/NAME\[@REVISION\]\[:SUBSET\]"):
        find_files(f"hub:{name}")


def test_without_a_network_the_hub_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the hub does not give it \(.*offline.*name a commit"):
        find_files("hub:owner/name:train")
    with pytest.raises(DataError, match=r"`datasets` cannot load it \(.*owner/name"):
        find_files(f"hub:owner/name@{'a' * 40}:train")


def test_without_a_network_a_commit_that_was_fetched_is_read_and_no_other(tmp_path: Path) -> None:
    commit = "ab" * 20
    source = write_hub_layout(tmp_path, conversations(range(3)))
    (made,) = find_files(source)
    place = tmp_path / "cache-of-datasets" / "owner___name" / "chats" / "0.0.0" / commit
    shutil.copytree(made.path.parent, place)
    for file in place.glob("repository-*"):
        file.rename(place / file.name.replace("repository-", "name-"))
    (file,) = find_files(f"hub:owner/name@{commit}:chats:train")
    assert file == DataFile(
        place / "name-train.arrow", f"hub:owner/name@{commit}:chats:train/name-train.arrow", "name"
    )
    assert [row["source"] for _, row in read_rows(file)] == ["made"] * 3
    with pytest.raises(DataError, match=r"local copy is of commit abababababab, not cdcdcdcdcdcd"):
        find_files(f"hub:owner/name@{'cd' * 20}:chats:train")


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        ("pyarrow.parquet", "x.parquet", "needs the package pyarrow: pip install 'draftcache"),
        ("pyarrow", "x.arrow", "needs the package pyarrow: pip install 'draftcache"),
        ("datasets", "hub:owner/name", "needs the package `datasets`: pip install 'draftcache"),
    ],
)
def test_a_missing_package_is_named(
    module: str, name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    (tmp_path / "x.arrow").write_bytes(b"")
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        read_all(name)


def test_a_table_may_have_tag_weight_and_limit(tiny_build: MakeBuild, tmp_path: Path) -> None:
    from dataclasses import replace

    config = tiny_build(tmp_path / "cache")
    source = SourceConfig(
        path=write_saved(tmp_path, conversations(range(30))), tag="mine", limit=11
    )
    report = build(replace(config, data=replace(config.data, sources=(source,))))
    assert report.manifest.sources == ("mine",)
    assert report.manifest.totals.num_samples == 11


def test_a_pattern_leaves_out_no_directory_and_no_link_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Path.glob` takes a directory that may not be read for an empty one."""
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        write_jsonl(tmp_path / "data" / name / "x.jsonl", conversations(range(2)))
    pattern = str(tmp_path / "data" / "*" / "*.jsonl")
    assert len(find_files(pattern)) == 2
    monkeypatch.chdir(tmp_path / "data" / "a")
    assert [file.name for file in find_files("../[ab]/*.jsonl")] == ["../a/x.jsonl", "../b/x.jsonl"]
    assert len(find_files("../**/x.jsonl")) == 2

    access = os.access
    with monkeypatch.context() as patch:
        closed = tmp_path / "data" / "b"
        patch.setattr(os, "access", lambda path, mode: path != closed and access(path, mode))
        with pytest.raises(DataError, match=f"{closed}: cannot be read"):
            find_files(pattern)
    (tmp_path / "data" / "b" / "y.jsonl").symlink_to("/nowhere/y.jsonl")
    with pytest.raises(DataError, match=r"y\.jsonl: a link to /nowhere/y\.jsonl"):
        find_files(pattern)
