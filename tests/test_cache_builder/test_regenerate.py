"""Regenerated answers are the target's own, whatever the batch and the interruptions."""

import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from cache_builder.answer_file import KEY, AnswerFile
from cache_builder.batches import Batches, Generator
from cache_builder.build import build
from cache_builder.cli import main
from cache_builder.config import DataConfig, TargetConfig
from cache_builder.conversation import Conversation, Drop, DropReason
from cache_builder.generation import Answer, LocalGenerator, Sampling
from cache_builder.record import parse_prompt
from cache_builder.regenerate import RegenerateReport, regenerate
from cache_builder.template import ChatTemplate
from cache_builder.tokens import load_template
from shared.cache import Cache
from shared.errors import ConfigError, DataError, OutOfSpaceError
from tests.conftest import REPOSITORY, conversations, write_jsonl
from tests.test_cache_builder.server import Hashing

pytestmark = pytest.mark.slow

FLOAT32 = "float32"
SAMPLING = Sampling(max_new_tokens=12)
BROKEN = -1
"""Stands for a token that is half a character: as text it has other ids."""


@pytest.fixture(scope="module")
def generator(tiny_target: Path) -> LocalGenerator:
    return LocalGenerator(tiny_target, TargetConfig(path=str(tiny_target), dtype=FLOAT32))


@pytest.fixture(scope="module")
def template(tiny_target: Path) -> ChatTemplate:
    return load_template(tiny_target, DataConfig(sources=("-",), max_length=256))


def prompts(path: Path, count: int, **fields: Any) -> Path:
    """Single-turn conversations whose recorded answers are somebody else's."""
    rows = [
        {"id": f"row-{n}", **row, **fields} for n, row in enumerate(conversations(range(count)))
    ]
    return write_jsonl(path, rows)


def run(
    generator: Generator, template: ChatTemplate, data: Path, out: Path, **options: Any
) -> tuple[list[dict[str, Any]], RegenerateReport]:
    settings: dict[str, Any] = {
        "generated_by": "tiny@0",
        "rendered_by": "0123",
        "sampling": SAMPLING,
        "max_length": 256,
    }
    report = regenerate(
        Batches(generator, 4), template, [str(data)], out, **{**settings, **options}
    )
    return [json.loads(line) for line in out.read_text().splitlines()], report


def greedy(target: Path, prompt: list[int], count: int) -> list[int]:
    """The slow reference: one prompt, unpadded, the whole sequence anew for every token."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ids = list(prompt)
    with torch.inference_mode():
        while len(ids) < len(prompt) + count:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == model.config.eos_token_id:
                break
    return ids[len(prompt) :]


def test_answers_are_the_greedy_text_of_each_prompt_alone(
    generator: LocalGenerator, template: ChatTemplate, tiny_target: Path, tmp_path: Path
) -> None:
    rows, report = run(generator, template, prompts(tmp_path / "p.jsonl", 7), tmp_path / "o.jsonl")
    assert (report.prompts.num_rows, report.num_answered, len(rows)) == (7, 7, 7)
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    for row in rows:
        user, assistant = row["messages"]
        prompt = tokenizer.apply_chat_template(
            [user], add_generation_prompt=True, return_dict=False
        )
        expected = greedy(tiny_target, prompt, SAMPLING.max_new_tokens)
        assert row["input_ids"] == prompt + expected
        assert row["loss_mask"] == [0] * len(prompt) + [1] * len(expected)
        is_ended = expected[-1] == tokenizer.eos_token_id
        assert row["finish_reason"] == ("stop" if is_ended else "length")
        assert assistant["content"] == tokenizer.decode(expected[:-1] if is_ended else expected)
        assert row["source"] == "made"
        assert row["id"].startswith("row-")
    assert sum(report.finish_reasons.values()) == 7
    assert report.num_new_tokens == sum(sum(row["loss_mask"]) for row in rows)


def test_defaults_of_the_target_change_no_answer(
    generator: LocalGenerator, template: ChatTemplate, tiny_target: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(tiny_target, tmp_path / "target")
    defaults = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "suppress_tokens": [70]}
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **defaults}))
    inclined = LocalGenerator(other, TargetConfig(path=str(other), dtype=FLOAT32))
    questions = [parse(row["messages"]).messages[:1] for row in conversations(range(3))]
    asked = [template.prompt_ids(question).tolist() for question in questions]
    for sampling in (SAMPLING, Sampling(max_new_tokens=12, temperature=1.0)):
        assert inclined.generate(asked, sampling) == generator.generate(asked, sampling)


def test_a_cache_of_the_answers_holds_exactly_the_generated_ids(
    generator: LocalGenerator, template: ChatTemplate, tiny_build: Any, tmp_path: Path
) -> None:
    out = tmp_path / "o.jsonl"
    rows, _ = run(generator, template, prompts(tmp_path / "p.jsonl", 6), out)
    build(tiny_build(tmp_path / "cache", data=[out]))
    cache = Cache(tmp_path / "cache")
    stored = {
        tuple(sample.token_ids.tolist()): sample.loss_mask.tolist()
        for sample in map(cache.read, range(len(cache.index)))
    }
    usable = [row for row in rows if sum(row["loss_mask"]) > 1]
    assert len(usable) > 3
    assert stored == {tuple(row["input_ids"]): row["loss_mask"] for row in usable}


def test_ids_are_left_out_only_where_the_text_gives_them_back(
    generator: LocalGenerator, template: ChatTemplate, tmp_path: Path
) -> None:
    data = prompts(tmp_path / "p.jsonl", 6)
    full, _ = run(generator, template, data, tmp_path / "full.jsonl")
    lean, report = run(generator, template, data, tmp_path / "lean.jsonl", omit_ids=True)
    needed = {row["id"] for row in lean if "input_ids" in row}
    assert report.num_ids_needed == len(needed)
    # A random byte-level model writes broken UTF-8, which is not the same bytes as text.
    assert needed == {row["id"] for row in full if "\ufffd" in row["messages"][1]["content"]}
    for row, whole in zip(lean, full, strict=True):
        if "input_ids" in row:
            assert row["input_ids"] == whole["input_ids"]


@pytest.mark.parametrize(
    ("words", "num_supervised"),
    [
        ([[10, 11, 12, 2], [13, 14, 2]], 7),
        ([[10, BROKEN, 12, 2], [13, 14, 2]], 3),
    ],
)
def test_every_turn_is_answered_on_top_of_the_new_answers(
    words: list[list[int]], num_supervised: int, template: ChatTemplate, tmp_path: Path
) -> None:
    broken = next(i for i in range(4, 260) if template.decode([i]) == "\ufffd")
    words = [[broken if i == BROKEN else i for i in ids] for ids in words]

    class Scripted:
        """Says `words`, since a random target hardly ever ends its turn."""

        eos_ids = frozenset({2})
        asked: ClassVar[list[list[int]]] = []

        def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Answer]:
            self.asked.extend(map(list, prompts))
            return [Answer(tuple(words[len(self.asked) - 1]), "stop")]

    turns = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "not the target's"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "nor this"},
    ]
    data = write_jsonl(tmp_path / "p.jsonl", [{"messages": turns}])
    generator = Scripted()
    rows, report = run(generator, template, data, tmp_path / "o.jsonl")
    messages = rows[0]["messages"]
    said = [template.decode(ids[:-1]) for ids in words]
    expected = [*turns[:2], {**turns[2], "content": said[0]}, turns[3]]
    assert messages == [*expected, {**turns[4], "content": said[1]}]
    assert template.decode(generator.asked[1]) == (
        "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in expected)
        + "<|im_start|>assistant\n"
    )
    assert rows[0]["input_ids"] == generator.asked[1] + words[1]
    assert sum(rows[0]["loss_mask"]) == num_supervised
    assert report.num_unsupervised_turns == (num_supervised == 3)
    assert report.finish_reasons == {"stop": 2}


def parse(messages: list[dict[str, str]]) -> Conversation:
    conversation = parse_prompt({"messages": messages})
    assert isinstance(conversation, Conversation)
    return conversation


def test_turns_behind_an_unfinished_answer_are_counted(
    generator: LocalGenerator, template: ChatTemplate, tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": word} for word in ("one", "two")]
    answers = [{"role": "assistant", "content": "x"}] * 2
    row = {"messages": [turns[0], answers[0], turns[1], answers[1]]}
    rows, report = run(
        generator,
        template,
        write_jsonl(tmp_path / "p.jsonl", [row]),
        tmp_path / "o.jsonl",
        sampling=Sampling(max_new_tokens=1),
    )
    assert rows[0]["finish_reason"] == "length"
    assert [m["role"] for m in rows[0]["messages"]] == ["user", "assistant"]
    assert report.num_turns_left_out == 1


def test_the_same_command_goes_on_where_it_was_killed(
    generator: LocalGenerator, template: ChatTemplate, tmp_path: Path
) -> None:
    data = prompts(tmp_path / "p.jsonl", 10)
    whole, _ = run(generator, template, data, tmp_path / "whole.jsonl")
    out = tmp_path / "torn.jsonl"
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:4]) + lines[4][:37])
    resumed, report = run(generator, template, data, out)
    assert (report.prompts.num_present, report.num_answered) == (4, 6)
    assert sorted(resumed, key=lambda row: row["id"]) == sorted(whole, key=lambda row: row["id"])
    again, report = run(generator, template, data, out)
    assert (again, report.num_answered) == (resumed, 0)


DIES = """
import os, signal
from cache_builder.__main__ import main
from cache_builder.answer_file import AnswerFile
append = AnswerFile.append
def die_after_four(self, rows):
    append(self, rows)
    if self.path.read_bytes().count(b"\\n") >= 4:
        os.kill(os.getpid(), signal.SIGKILL)
AnswerFile.append = die_after_four
main()
"""


def test_sigkill_loses_no_answer_that_was_written(
    template: ChatTemplate, generator: LocalGenerator, tiny_target: Path, tmp_path: Path
) -> None:
    data, out = prompts(tmp_path / "p.jsonl", 24), tmp_path / "o.jsonl"
    config = tmp_path / "cache.toml"
    config.write_text(
        f'[cache]\npath = "{tmp_path}/c"\n[target]\npath = "{tiny_target}"\ndtype = "float32"\n'
        f'[data]\nsources = ["{data}"]\nmax_length = 256\n'
    )
    command = [
        *("regenerate", "--config", str(config)),
        *(str(data), "-o", str(out), "--max-new-tokens", "12", "--batch-size", "2"),
    ]
    killed = subprocess.run([sys.executable, "-c", DIES, *command], cwd=REPOSITORY)
    assert killed.returncode == -signal.SIGKILL
    kept = out.read_bytes()
    assert kept.count(b"\n") == 4
    command = [sys.executable, "-m", "cache_builder", *command]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes().startswith(kept)
    reference, _ = run(generator, template, data, tmp_path / "reference.jsonl")
    found = {row["id"]: row["input_ids"] for row in map(json.loads, out.read_text().splitlines())}
    assert found == {row["id"]: row["input_ids"] for row in reference}


@pytest.fixture
def command(tmp_path: Path, tiny_target: Path) -> list[str]:
    """`cache-builder regenerate` of three prompts, which are the data of its configuration too."""
    data, config = prompts(tmp_path / "p.jsonl", 3), tmp_path / "cache.toml"
    config.write_text(
        f'[cache]\npath = "{tmp_path}/c"\n[target]\npath = "{tiny_target}"\ndtype = "float32"\n'
        f'[data]\nsources = ["{data}"]\nmax_length = 256\n'
    )
    out = tmp_path / "o.jsonl"
    return ["regenerate", "--config", str(config), str(data), "-o", str(out), "--limit", "1"]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "tiny"),
        ({"target.name": "Tiny-4"}, "Tiny-4"),
        ({"target.path": "lab/Tiny-0.1B"}, "Tiny-0.1B"),
    ],
)
def test_answers_bear_the_name_by_which_a_build_knows_them_for_its_targets_own(
    settings: dict[str, str],
    name: str,
    command: list[str],
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a model of the hub, the end of its name there: its local directory is called by commit."""
    cached = tmp_path / "models--lab--Tiny-0.1B"
    shutil.copytree(tiny_target, cached / "snapshots" / ("0123456789" * 4))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123456789" * 4)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    result = CliRunner().invoke(main, [*command, *given, "--max-new-tokens", "4"])
    assert result.exit_code == 0, result.exception
    (row,) = map(json.loads, (tmp_path / "o.jsonl").read_text().splitlines())
    assert row["generated_by"].partition("@")[0] == name
    sources = ["--set", f'data.sources=["{tmp_path / "o.jsonl"}"]']
    result = CliRunner().invoke(main, ["preview", *command[1:3], *given, *sources])
    assert "1 sample" in result.output
    assert "not answered by the target" not in result.output


@pytest.mark.parametrize("options", [[], ["--max-new-tokens", "256"]])
def test_answers_that_leave_no_room_for_a_prompt_are_refused(
    options: list[str], command: list[str], tmp_path: Path
) -> None:
    """Every prompt would be left out as too long, one after the other."""
    result = CliRunner().invoke(main, [*command, *options])
    assert isinstance(result.exception, ConfigError)
    assert f"--max-new-tokens {(options or ['', '2048'])[-1]}" in str(result.exception)
    assert "data.max_length 256" in str(result.exception)
    assert not (tmp_path / "o.jsonl").exists()


def test_answers_of_other_settings_are_not_mixed(
    generator: LocalGenerator, template: ChatTemplate, tmp_path: Path
) -> None:
    data, out = prompts(tmp_path / "p.jsonl", 2), tmp_path / "o.jsonl"
    run(generator, template, data, out)
    before = out.read_bytes()
    with pytest.raises(DataError, match=r"'max_new_tokens': 12.*'max_new_tokens': 13"):
        run(generator, template, data, out, sampling=Sampling(max_new_tokens=13))
    with pytest.raises(DataError, match=r"p\.jsonl:1: not a row that"):
        run(generator, template, data, data)
    assert out.read_bytes() == before


def test_answers_of_another_template_or_mode_are_not_mixed(
    tiny_target: Path, template: ChatTemplate, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    other = ChatTemplate(tokenizer, {"enable_thinking": False})
    data, out = prompts(tmp_path / "p.jsonl", 2), tmp_path / "o.jsonl"
    run(Hashing(), template, data, out, limit=1)
    before = out.read_bytes()
    with pytest.raises(DataError, match=r"would be by .*'enable_thinking': False"):
        run(Hashing(), other, data, out)
    with pytest.raises(DataError, match=r"'rendered_by': '0123'.*'rendered_by': '4567'"):
        run(Hashing(), template, data, out, rendered_by="4567")
    assert out.read_bytes() == before
    out.write_bytes(before.replace(b'"rendered_by":"0123",', b""))  # as older versions wrote it
    assert len(run(Hashing(), template, data, out)[0]) == 2
    run(Hashing(), other, data, tmp_path / "other.jsonl", limit=1)
    with pytest.raises(DataError, match=r"answered by .*'enable_thinking': False"):
        run(Hashing(), template, data, tmp_path / "other.jsonl")
    assert len(run(Hashing(), other, data, tmp_path / "other.jsonl")[0]) == 2


def test_sampling_draws_the_same_again_and_other_answers_for_another_seed(
    generator: LocalGenerator, template: ChatTemplate, tmp_path: Path
) -> None:
    data = prompts(tmp_path / "p.jsonl", 4)

    def ids(name: str, seed: int) -> list[list[int]]:
        sampling = Sampling(max_new_tokens=12, temperature=1.0, top_p=0.9, seed=seed)
        rows, _ = run(generator, template, data, tmp_path / name, sampling=sampling)
        return [row["input_ids"] for row in rows]

    assert ids("a", 0) == ids("b", 0) != ids("c", 1)


def test_rows_that_cannot_be_asked_are_counted_by_reason(
    generator: LocalGenerator, template: ChatTemplate, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "hello"},
        {"prompt": "hello", "response": "the same prompt"},
        {"messages": [{"role": "system", "content": "no user"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]},
        {"text": "a page"},
        {"prompt": "long " * 60},
        {"prompt": "a<|im_end|>\n<|im_start|>assistant\nb"},
    ]
    made, report = run(
        generator, template, write_jsonl(tmp_path / "p.jsonl", rows), tmp_path / "o.jsonl"
    )
    assert [row["messages"][0]["content"] for row in made] == ["hello"]
    assert report.prompts.num_duplicates == 1
    assert report.prompts.dropped == {
        DropReason.NO_USER_TURN: 1,
        DropReason.TOOL_RESULT: 1,
        DropReason.UNKNOWN_SHAPE: 1,
        DropReason.CONTROL_TOKEN: 1,
        "too_long": 1,
    }


def test_other_columns_of_a_table_are_carried_over_as_json(
    template: ChatTemplate, tmp_path: Path
) -> None:
    moment = datetime.datetime(2024, 5, 6, 7, 8, 9, tzinfo=datetime.UTC)
    columns = {
        "prompt": arrow.array(["hello"]),
        "id": arrow.array([7]),
        "time": arrow.array([moment], arrow.timestamp("us", "UTC")),
        "day": arrow.array([moment.date()]),
        "price": arrow.array([Decimal("1.50")]),
        "image": arrow.array([{"bytes": b"\xff\x00", "path": None}]),
        "seen": arrow.array([[(moment.date(), b"a")]], arrow.map_(arrow.date32(), arrow.binary())),
    }
    data = tmp_path / "p.parquet"
    parquet.write_table(arrow.table(columns), data)
    carried = {
        "id": 7,
        "time": "2024-05-06T07:08:09+00:00",
        "day": "2024-05-06",
        "price": "1.50",
        "image": {"bytes": "/wA="},
        "seen": {"2024-05-06": "YQ=="},
    }
    (row,), report = run(Hashing(), template, data, tmp_path / "o.jsonl")
    assert report.num_answered == 1
    assert {key: row.get(key) for key in carried} == carried
    (again,), report = run(Hashing(), template, data, tmp_path / "o.jsonl")
    assert (again, report.num_answered) == (row, 0)


def test_half_of_a_surrogate_pair_is_carried_over(template: ChatTemplate, tmp_path: Path) -> None:
    data = tmp_path / "p.jsonl"
    data.write_text(r'{"prompt": "hello", "n\udc00te": "\ud800"}' + "\n")
    (row,), _ = run(Hashing(), template, data, tmp_path / "o.jsonl")
    assert row["n\udc00te"] == "\ud800"


def test_a_field_that_is_nested_too_deeply_is_named_before_anything_is_asked(
    template: ChatTemplate, tmp_path: Path
) -> None:
    deep = "[" * 900 + "]" * 900
    data = tmp_path / "p.jsonl"
    data.write_text(f'{{"prompt": "hello", "meta": {deep}}}\n{{"prompt": "well"}}\n')
    rows, report = run(Hashing(), template, data, tmp_path / "o.jsonl")
    assert [row["messages"][0]["content"] for row in rows] == ["well"]
    assert report.prompts.dropped == {DropReason.BAD_FIELD: 1}


def test_a_prompt_keeps_what_is_asked_and_drops_what_was_answered() -> None:
    conversation = parse(
        [
            {"role": "assistant", "content": "how can I help?"},
            {"role": "user", "content": "a"},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ]
    )
    assert [(m.role, m.content) for m in conversation.messages] == [
        ("user", "a"),
        ("user", "b"),
        ("assistant", ""),
        ("user", "d"),
        ("assistant", ""),
    ]
    assert isinstance(parse_prompt({"messages": []}), Drop)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_one_line_and_keeps_what_was_written(tmp_path: Path) -> None:
    out, origin = tmp_path / "out.jsonl", {"generated_by": "x", "sampling": {}}
    row = {KEY: "00" * 16, **origin}

    def fill_the_disk(full: int) -> None:
        with AnswerFile(out, origin) as answers:
            answers.append([row])
            os.dup2(full, answers._file.fileno())
            answers.append([row])

    full = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OutOfSpaceError, match=r"out\.jsonl: no space left"):
        fill_the_disk(full)
    os.close(full)
    assert json.loads(out.read_text()) == row


def test_two_writers_of_one_file_are_refused(tmp_path: Path) -> None:
    out, origin = tmp_path / "out.jsonl", {"generated_by": "x", "sampling": {}}
    row = {KEY: "00" * 16, **origin}
    with AnswerFile(out, origin) as first:
        first.append([row])
        with pytest.raises(DataError, match=r"out\.jsonl: another `cache-builder regenerate`"):
            AnswerFile(out, origin)
    with AnswerFile(out, origin) as again:  # the lock went with its holder
        assert again.take(bytes(16))
    with pytest.raises(DataError, match="answered by"):
        AnswerFile(out, {**origin, "generated_by": "y"})
    with AnswerFile(out, origin):  # and with one that was refused
        assert json.loads(out.read_text()) == row
