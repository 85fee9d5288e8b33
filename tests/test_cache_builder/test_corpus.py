"""Every row becomes a sample or a counted, named drop."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import cache_builder
from cache_builder.config import SourceConfig
from cache_builder.conversation import DropReason
from cache_builder.corpus import CorpusReader, TokenizedSample, read_corpus
from cache_builder.rows import digest_file
from cache_builder.template import ChatTemplate
from shared.errors import DataError
from tests.conftest import BUSY

WORDS = ["<unk>", "<s>", "<end>", "user", "assistant", *"abcdefgh"]
VOCAB_SIZE = len(WORDS)
END, USER, ASSISTANT = (WORDS.index(word) for word in ("<end>", "user", "assistant"))
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ' ' + m.content + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    """One token a word."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="<end>"
    )
    wrapped.chat_template = TEMPLATE
    return ChatTemplate(wrapped, {})


def chat(prompt: str, answer: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "response": answer, **fields}


def write(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(template: ChatTemplate, *sources: str | SourceConfig, **options: Any) -> CorpusReader:
    rules: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "max_length": 64,
        "truncation": "cut",
        "cut_off_answers": "keep",
        "on_bad_row": "count",
        "supervise_text": False,
    }
    configs = [SourceConfig(path=s) if isinstance(s, str) else s for s in sources]
    return read_corpus(configs, template, **(rules | options))


def counts(reader: CorpusReader) -> dict[str, int]:
    return {str(reason): dropped.count for reason, dropped in reader.report.dropped.items()}


def sample(token_ids: Sequence[int], loss_mask: Sequence[int]) -> TokenizedSample:
    ids, mask = np.array(token_ids, np.int32), np.array(loss_mask, np.uint8)
    return TokenizedSample(ids, mask, source="s", file="f", row=1, generated_by=None)


# --- samples


def test_a_row_becomes_ids_mask_and_origin(template: ChatTemplate, tmp_path: Path) -> None:
    row = chat("a b", "c d", source="gsm8k", generated_by="tiny")
    path = write(tmp_path / "chats.jsonl", [row])
    (only,) = read(template, path)
    a, b, c, d = (WORDS.index(letter) for letter in "abcd")
    assert only.token_ids.tolist() == [USER, a, b, END, ASSISTANT, c, d, END]
    assert only.loss_mask.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert only.token_ids.dtype == np.int32
    assert only.loss_mask.dtype == np.uint8
    assert (only.source, only.file, only.row, only.generated_by) == ("gsm8k", path, 1, "tiny")


def test_source_is_the_tag_or_the_rows_own_or_the_file(
    template: ChatTemplate, tmp_path: Path
) -> None:
    path = write(tmp_path / "chats.jsonl", [chat("a", "b", source="own"), chat("a", "c")])
    assert [s.source for s in read(template, path)] == ["own", "chats"]
    tagged = read(template, SourceConfig(path=path, tag="mine"))
    assert [s.source for s in tagged] == ["mine", "mine"]


def test_sample_id_is_stable_and_of_ids_and_mask_only() -> None:
    assert sample([1, 2, 300], [0, 1, 1]).sample_id == "0b065dd462dbefb50852148bb58ea2fb"
    assert sample([1, 2, 300], [0, 0, 1]).sample_id != sample([1, 2, 300], [0, 1, 1]).sample_id
    assert sample([1, 2, 301], [0, 1, 1]).sample_id != sample([1, 2, 300], [0, 1, 1]).sample_id


def test_split_key_is_that_of_the_prompt() -> None:
    one, other = sample([1, 2, 5, 6], [0, 0, 1, 1]), sample([1, 2, 7, 8, 9], [0, 0, 1, 1, 1])
    assert one.split_key == other.split_key == 11923938142401603107
    assert 0 <= one.split_key < 2**64
    assert one.split_key != sample([1, 3, 5, 6], [0, 0, 1, 1]).split_key
    text = [sample([1, 5, 6], [0, 1, 1]), sample([1, 7, 8], [0, 1, 1])]
    assert text[0].split_key != text[1].split_key


def test_duplicates_are_one_sample_also_across_files(
    template: ChatTemplate, tmp_path: Path
) -> None:
    first = write(tmp_path / "1.jsonl", [chat("a", "b"), chat("a", "c"), chat("a", "b")])
    second = write(tmp_path / "2.jsonl", [{"messages": [], **chat("a", "b")}, chat("a", "d")])
    (tmp_path / "2.jsonl").write_text(json.dumps(chat("a", "c")) + "\n")
    reader = read(template, first, second)
    assert len(list(reader)) == 2
    assert reader.report.num_duplicates == 2


# --- shapes that are not conversations


def test_tokens_are_taken_as_they_are(template: ChatTemplate, tmp_path: Path) -> None:
    row = {"input_ids": [3, 4, 5, 6], "loss_mask": [0, 0, 1, 1]}
    (only,) = read(template, write(tmp_path / "x.jsonl", [row]))
    assert (only.token_ids.tolist(), only.loss_mask.tolist()) == ([3, 4, 5, 6], [0, 0, 1, 1])


def test_tokens_of_another_mode_are_named(template: ChatTemplate, tmp_path: Path) -> None:
    row = {"input_ids": [10, 11, 12], "loss_mask": [0, 1, 1]}
    other = {**row, "chat_template_kwargs": {"enable_thinking": False}}
    reader = read(template, write(tmp_path / "x.jsonl", [row, other]))
    assert len(list(reader)) == 1
    assert counts(reader) == {DropReason.MODE_MISMATCH: 1}


def test_text_is_supervised_only_on_request(template: ChatTemplate, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", [{"text": "a b c"}, chat("a", "b")])
    reader = read(template, path)
    assert len(list(reader)) == 1
    assert counts(reader) == {"mask_not_provable": 1}
    (example,) = reader.report.dropped[DropReason.MASK_NOT_PROVABLE].examples
    assert "data.supervise_text" in example
    text = next(iter(read(template, path, supervise_text=True)))
    assert text.loss_mask.tolist() == [0, 1, 1]


# --- rows that cannot be used


@pytest.mark.parametrize("bad_id", [VOCAB_SIZE, -1, 2**31, -(2**70)])
def test_id_outside_the_vocabulary_is_refused_with_its_row(
    template: ChatTemplate, tmp_path: Path, bad_id: int
) -> None:
    rows = [chat("a", "b"), {"input_ids": [3, bad_id, 4], "loss_mask": [0, 1, 1]}, chat("a", "c")]
    path = write(tmp_path / "x.jsonl", rows)
    reader = read(template, path)
    assert [s.row for s in reader] == [1, 3]
    (example,) = reader.report.dropped[DropReason.ID_OUT_OF_RANGE].examples
    assert example.startswith(f"{path}:2: ")
    assert "position 1, expected 0 to 12" in example


def test_conversation_beyond_a_smaller_vocabulary_is_refused(
    template: ChatTemplate, tmp_path: Path
) -> None:
    path = write(tmp_path / "x.jsonl", [chat("a", "h"), chat("a", "b")])
    reader = read(template, path, vocab_size=VOCAB_SIZE - 1)
    assert [s.row for s in reader] == [2]
    assert counts(reader) == {"id_out_of_range": 1}


def test_two_begin_tokens_are_refused(template: ChatTemplate, tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 1, 5, 6], "loss_mask": [0, 0, 1, 1]}, chat("a", "b")]
    reader = read(template, write(tmp_path / "x.jsonl", rows))
    assert len(list(reader)) == 1
    assert counts(reader) == {"double_bos": 1}


def test_truncation_is_counted_and_may_not_remove_all_supervision(
    template: ChatTemplate, tmp_path: Path
) -> None:
    rows = [chat("a", "b c d e"), chat("a b c d e", "f g"), chat("a", "b")]
    path = write(tmp_path / "x.jsonl", rows)
    reader = read(template, path, max_length=6)
    cut, short = reader
    assert cut.loss_mask.tolist() == [0, 0, 0, 0, 1, 1]
    assert len(short.token_ids) == 6
    assert reader.report.num_truncated == 1
    assert counts(reader) == {"truncated_without_supervision": 1}

    dropping = read(template, path, max_length=6, truncation="drop")
    assert [s.row for s in dropping] == [3]
    assert counts(dropping) == {"too_long": 2}
    assert dropping.report.num_truncated == 0


def test_sample_from_which_no_block_can_be_drafted_is_too_short(
    template: ChatTemplate, tmp_path: Path
) -> None:
    rows = [
        {"input_ids": [], "loss_mask": []},
        {"input_ids": [3, 4], "loss_mask": [0, 0]},
        {"input_ids": [3, 4, 5], "loss_mask": [1, 0, 1]},
        {"input_ids": [3, 4, 5], "loss_mask": [0, 1, 1]},
    ]
    reader = read(template, write(tmp_path / "x.jsonl", rows))
    assert [s.row for s in reader] == [4]
    assert counts(reader) == {"too_short": 3}


def test_cut_off_answers_are_counted_and_kept_without_an_end_or_dropped(
    template: ChatTemplate, tmp_path: Path
) -> None:
    letters = "abcdefgh"
    rows = [
        chat("a b", f"{letter} {letter}", finish_reason="length" if i < 4 else "stop")
        for i, letter in enumerate([*letters, "a b", "c d"])
    ]
    path = write(tmp_path / "x.jsonl", rows)
    keeping = read(template, path)
    kept = list(keeping)
    assert [END in s.token_ids[s.loss_mask == 1] for s in kept] == [False] * 4 + [True] * 6
    assert all(s.token_ids[-1] != END for s in kept[:4])
    assert keeping.report.num_cut_off == 4

    dropping = read(template, path, cut_off_answers="drop")
    assert len(list(dropping)) == 6
    assert dropping.report.num_cut_off == 4
    assert counts(dropping) == {"cut_off": 4}


BAD_ROWS = [
    {"messages": [{"role": "assistant", "content": "a b"}]},  # first turn: this template takes it
    chat("a", ""),
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b c"},
            {"role": "tool", "content": "d"},
        ]
    },
    {"messages": [{"role": "system", "content": "a"}]},
    {"messages": [{"role": "narrator", "content": "a"}]},
    {"nothing": 1},
    [1, 2],
    {"input_ids": [1, 2]},
    chat("a", "b \ud800"),
    chat("a", "<think>b"),
]


def test_every_bad_row_is_named_and_the_counts_add_up(
    template: ChatTemplate, tmp_path: Path
) -> None:
    reader = read(template, write(tmp_path / "x.jsonl", BAD_ROWS))
    assert [s.row for s in reader] == [1, 3]
    assert counts(reader) == {
        "empty_assistant_turn": 2,
        "no_assistant_turn": 1,
        "unknown_role": 1,
        "unknown_shape": 2,
        "mask_not_provable": 1,
        "bad_field": 1,
    }
    report = reader.report
    assert report.num_rows == len(BAD_ROWS) == report.num_kept + report.num_dropped
    assert any(line.split()[:2] == ["unknown_shape", "2"] for line in report.describe_drops())


@settings(
    max_examples=25,
    suppress_health_check=[*BUSY, HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(BAD_ROWS),
            st.builds(chat, st.sampled_from("abc"), st.sampled_from(["d", "e f", ""])),
            st.dictionaries(
                st.sampled_from(["messages", "text", "prompt", "response", "input_ids"]),
                st.recursive(
                    st.none() | st.integers() | st.text(max_size=3),
                    lambda inner: st.lists(inner, max_size=2),
                    max_leaves=4,
                ),
            ),
        ),
        max_size=8,
    )
)
def test_any_rows_are_kept_or_dropped_and_never_raise(
    template: ChatTemplate, tmp_path: Path, rows: list[Any]
) -> None:
    reader = read(template, write(tmp_path / "x.jsonl", [chat("a", "g h"), *rows]))
    kept = list(reader)
    report = reader.report
    assert report.num_rows == len(rows) + 1 == len(kept) + report.num_dropped
    assert report.num_kept == len(kept) == len({s.sample_id for s in kept})
    assert report.num_tokens == sum(len(s.token_ids) for s in kept)
    assert report.num_supervised_tokens == sum(int(s.loss_mask.sum()) for s in kept)
    json.dumps(report.to_dict())


def test_report_names_models_and_keeps_eight_examples(
    template: ChatTemplate, tmp_path: Path
) -> None:
    rows = [{"x": 1}] * 20 + [chat("a", "b", answered_by="other"), chat("a", "c")]
    reader = read(template, write(tmp_path / "x.jsonl", rows))
    list(reader)
    assert reader.report.generated_by == {"other": 1, "unknown": 1}
    dropped = reader.report.dropped[DropReason.UNKNOWN_SHAPE]
    assert (dropped.count, len(dropped.examples)) == (20, 8)


def test_bad_row_stops_the_build_where_asked(template: ChatTemplate, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", [chat("a", "b"), chat("a", "b"), {"x": 1}])
    with pytest.raises(DataError, match=rf"{path}:3: unknown_shape: .* Fix or delete the row"):
        list(read(template, path, on_bad_row="stop"))


# --- files


def test_malformed_line_stops_with_file_and_line(template: ChatTemplate, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(chat("a", "b")) + '\n\n{"prompt": "a",\n')
    reader = read(template, str(path))
    assert next(reader).row == 1
    with pytest.raises(DataError, match=rf"{path}:3: expected one JSON object per line"):
        next(reader)


def test_json_array_and_wrong_encoding_say_what_to_do(
    template: ChatTemplate, tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("[\n" + json.dumps(chat("a", "b")) + "\n]\n")
    with pytest.raises(DataError, match="looks like one JSON array"):
        list(read(template, str(path)))
    path.write_bytes('{"text": "é"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"x\.jsonl:1: .*utf-8.*Write the file as UTF-8"):
        list(read(template, str(path)))
    path.write_bytes('{"text": "e"}\n'.encode("utf-16"))
    with pytest.raises(DataError, match=r"x\.jsonl:1: .*utf-8.*Write the file as UTF-8"):
        list(read(template, str(path)))


def test_byte_order_mark_and_line_separators_are_no_errors(
    template: ChatTemplate, tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    line = json.dumps(chat("a \u2028 b", "c"), ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n" + line.encode())
    reader = read(template, str(path))
    assert len(list(reader)) == 1
    assert reader.report.num_rows == 2


def test_files_globs_directories_and_gzip_are_read_in_order(
    template: ChatTemplate, tmp_path: Path
) -> None:
    second = write(tmp_path / "b.jsonl", [chat("a", "b")])
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps(chat("a", "c")) + "\n")
    (tmp_path / "notes.txt").write_text("not data")
    expected = ["a.jsonl.gz", "b.jsonl"]
    for source in (str(tmp_path), str(tmp_path / "*.jsonl*")):
        assert [Path(s.file).name for s in read(template, source)] == expected
    assert [s.file for s in read(template, second)] == [second]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.jsonl", r"missing.jsonl: no such file or directory"),
        ("*.none", "matches no file"),
        ("empty", r"empty: expected one of \*.jsonl, .* in this directory, found none"),
        ("table.csv", r"table.csv: expected one of \*.jsonl, \*.jsonl.gz, \*.parquet"),
    ],
)
def test_source_without_rows_to_read_is_refused_at_once(
    template: ChatTemplate, tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "table.csv").write_text("a,b")
    with pytest.raises(DataError, match=message):
        read(template, str(tmp_path / name))


def test_dataset_without_a_usable_row_is_refused(template: ChatTemplate, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        list(read(template, write(tmp_path / "x.jsonl", [])))
    path = write(tmp_path / "x.jsonl", [{"x": 1}, chat("a", "")])
    with pytest.raises(DataError, match=r"none of 2 rows can be used: 1 unknown_shape \(.*:1: "):
        list(read(template, path))


def test_damaged_gzip_is_refused(template: ChatTemplate, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(chat("a", "b")).encode() * 50)[:-12])
    with pytest.raises(DataError, match=r"cannot be read"):
        list(read(template, str(path)))


# --- the demo


def test_demo_data_is_whole_for_the_demo_target(target_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    demo = Path(cache_builder.__file__).parent / "data" / "demo.jsonl"
    assert demo.stat().st_size <= 2_000_000
    reader = read(ChatTemplate(tokenizer, {}), str(demo), vocab_size=49152, max_length=1024)
    samples = list(reader)
    report = reader.report
    assert report.num_rows == report.num_kept == len(samples)
    assert report.num_straddling_tokens == report.num_truncated == 0
    assert set(report.generated_by) == {s.generated_by for s in samples}
    assert "unknown" not in report.generated_by
    ends = [s.token_ids[s.loss_mask == 1][-1] == tokenizer.eos_token_id for s in samples]
    assert ends.count(False) == report.num_cut_off


# --- subsets of a source


def test_weight_takes_a_share_of_the_rows_whatever_their_order(
    template: ChatTemplate, tmp_path: Path
) -> None:
    pairs = [(a, b, c) for a in "abcdefgh" for b in "abcdefgh" for c in "abcdefgh"]
    rows = [chat(f"{a} {b}", c) for a, b, c in pairs]
    one, other = write(tmp_path / "1.jsonl", rows), write(tmp_path / "2.jsonl", rows[::-1])
    taken = {s.sample_id for s in read(template, SourceConfig(path=one, weight=0.25))}
    assert 0.18 * len(rows) < len(taken) < 0.32 * len(rows)
    assert {s.sample_id for s in read(template, SourceConfig(path=other, weight=0.25))} == taken
    more = {s.sample_id for s in read(template, SourceConfig(path=one, weight=0.5))}
    assert taken < more


def test_limit_takes_that_many_rows_of_all_files_of_a_source(
    template: ChatTemplate, tmp_path: Path
) -> None:
    rows = [chat(f"{a} {b}", "c") for a in "abcdefgh" for b in "abcdefgh"]
    write(tmp_path / "1.jsonl", rows[:40])
    write(tmp_path / "2.jsonl", [*rows[40:], *rows[:5]])
    reader = read(template, SourceConfig(path=str(tmp_path), limit=10))
    taken = [s.sample_id for s in reader]
    assert len(taken) == 10
    assert counts(reader)["not_chosen"] >= 54
    assert reader.report.num_unusable == 0
    fewer = read(template, SourceConfig(path=str(tmp_path), limit=4))
    assert {s.sample_id for s in fewer} < set(taken)
    both = read(template, SourceConfig(path=str(tmp_path), limit=10, weight=0.05))
    assert len(list(both)) < 10
    assert len(list(read(template, SourceConfig(path=str(tmp_path), limit=1000)))) == 64


# --- the account


def test_drops_are_a_table_with_first_places(template: ChatTemplate, tmp_path: Path) -> None:
    rows = [chat("a", "b"), *5 * [{"text": "a"}], {"messages": []}, chat("a", "b")]
    path = write(tmp_path / "x.jsonl", rows)
    reader = read(template, path)
    assert len(list(reader)) == 1
    header, text, shape, duplicate, share = reader.report.describe_drops()
    assert header.split() == ["dropped", "rows", "first"]
    assert text.split()[:2] == ["mask_not_provable", "5"]
    assert f"{path}:2: plain text" in text
    assert text.endswith(f"(also {path}:3, {path}:4, ...)")
    assert shape.split()[:2] == ["no_assistant_turn", "1"]
    assert duplicate.split()[:2] == ["duplicate", "1"]
    assert share.startswith("75.0 % of the rows cannot be used (6 of 8)")


def test_a_small_share_of_drops_is_not_remarked_on(template: ChatTemplate, tmp_path: Path) -> None:
    rows = [chat(f"{a} {b}", c) for a in "abcdefgh" for b in "abcdefgh" for c in "abcdefgh"]
    reader = read(template, write(tmp_path / "x.jsonl", [*rows, {"text": "a"}]))
    assert len(list(reader)) == 512
    assert len(reader.report.describe_drops()) == 2
    assert read(template, write(tmp_path / "y.jsonl", rows)).report.describe_drops() == []


def test_more_tags_than_an_index_can_hold_are_refused(
    template: ChatTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_builder.corpus.MAX_SOURCES", 2)
    path = write(tmp_path / "x.jsonl", [chat("a", c, source=c) for c in "abc"])
    with pytest.raises(DataError, match=r"x\.jsonl:3: source tag 'c' is one more than the 2 that"):
        list(read(template, path))
    assert len(list(read(template, SourceConfig(path=path, tag="t")))) == 3


def test_what_is_read_is_what_was_hashed(template: ChatTemplate, tmp_path: Path) -> None:
    paths = [tmp_path / "1.jsonl", tmp_path / "2.jsonl.gz"]
    lines = "".join(json.dumps(chat("a", c)) + "\n" for c in "abc").encode()
    paths[0].write_bytes(lines)
    paths[1].write_bytes(gzip.compress(lines.replace(b'"a"', b'"h"', 1)))
    digests = {path: digest_file(path) for path in paths}
    assert len(list(read(template, *map(str, paths), digests=digests))) == 4
    for path in paths:
        wrong = {**digests, path: "0" * 64}
        with pytest.raises(DataError, match=rf"{path.name}: changed while it was read"):
            list(read(template, *map(str, paths), digests=wrong))
    with pytest.raises(DataError, match=r"2\.jsonl\.gz: changed while it was read"):
        read(template, *map(str, paths), digests={paths[0]: digests[paths[0]]})


@pytest.mark.parametrize("pattern", ["**x/*.jsonl", "a" * 3000 + "/x.jsonl"])
def test_paths_that_cannot_be_are_one_line(
    template: ChatTemplate, tmp_path: Path, pattern: str
) -> None:
    with pytest.raises(DataError, match=r"not a pattern|cannot be looked at"):
        read(template, str(tmp_path / pattern))
