"""What decides the ids is in the fingerprint, and settings that cannot be are refused."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cache_builder.config import DataConfig
from cache_builder.target_config import load_config
from cache_builder.tokens import describe_tokens, load_template, max_positions
from shared.errors import ConfigError
from shared.spec import TokenSpec


@pytest.fixture
def target(tiny_target: Path, tmp_path: Path) -> Path:
    """A copy of the tiny target without its weights."""
    copy = tmp_path / "target"
    shutil.copytree(tiny_target, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    return copy


def describe(path: Path, **fields: Any) -> TokenSpec:
    config = DataConfig(**{"sources": ("-",), "max_length": 256, **fields})
    return describe_tokens(path, config, load_template(path, config), load_config(path))


def change(path: Path, **fields: Any) -> None:
    found = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**found, **fields}))


@pytest.mark.parametrize(
    ("name", "fields", "key"),
    [
        ("tokenizer_config.json", {"add_prefix_space": True}, "tokenizer_sha256"),
        ("tokenizer_config.json", {"bos_token": "<|mask|>"}, "tokenizer_sha256"),
        ("special_tokens_map.json", {"bos_token": "<|mask|>"}, "tokenizer_sha256"),
        ("added_tokens.json", {"<|mask|>": 3}, "tokenizer_sha256"),
        ("generation_config.json", {"eos_token_id": [2, 3]}, "eos_token_ids"),
    ],
)
def test_every_file_of_the_tokenizer_is_in_the_fingerprint(
    target: Path, name: str, fields: dict[str, Any], key: str
) -> None:
    before = describe(target)
    change(target / name, **fields)
    assert getattr(describe(target), key) != getattr(before, key)


def test_the_template_is_in_the_fingerprint_wherever_it_is_written(target: Path) -> None:
    before = describe(target)
    text = (target / "chat_template.jinja").read_text()
    (target / "chat_template.jinja").unlink()
    change(target / "tokenizer_config.json", chat_template=text)
    assert describe(target) == before
    change(target / "tokenizer_config.json", chat_template=text + " ")
    assert describe(target).template_sha256 != before.template_sha256


def test_notes_in_the_tokenizers_config_change_nothing(target: Path) -> None:
    before = describe(target)
    change(target / "tokenizer_config.json", name_or_path="/elsewhere", processor_class="P")
    assert describe(target) == before


def test_samples_beyond_the_targets_positions_are_refused(target: Path) -> None:
    assert describe(target, max_length=512).max_length == 512
    with pytest.raises(ConfigError, match=r"data\.max_length 513: .* 512 positions"):
        describe(target, max_length=513)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, None, id="no-limit"),
        pytest.param({"max_position_embeddings": 4096}, 4096, id="plain"),
        pytest.param(
            {
                "max_position_embeddings": 40960,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
            id="yarn-by-hand",
        ),
        pytest.param(
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {
                    "full": {"factor": 8.0, "original_max_position_embeddings": 8192},
                    "sliding": {"rope_type": "default"},
                },
            },
            131072,
            id="scaled-positions-are-counted",
        ),
        pytest.param(
            {"max_position_embeddings": 2048, "rope_scaling": None}, 2048, id="no-scaling"
        ),
    ],
)
def test_positions_count_scaling_once(fields: dict[str, Any], expected: int | None) -> None:
    assert max_positions(SimpleNamespace(**fields)) == expected


def test_template_arguments_of_our_own_are_a_configuration_error(target: Path) -> None:
    config = DataConfig(sources=("-",), max_length=8, template_arguments={"messages": "x"})
    with pytest.raises(ConfigError, match=r"^data\.template_arguments: must not set messages"):
        load_template(target, config)


def test_end_tokens_of_the_generation_config_are_control_tokens(target: Path) -> None:
    from cache_builder.conversation import Drop, DropReason
    from cache_builder.record import parse_record

    change(target / "generation_config.json", eos_token_id=[2, 3])
    template = load_template(target, DataConfig(sources=("-",), max_length=8))
    conversation = parse_record({"prompt": "q", "response": "a <|mask|>"})
    assert not isinstance(conversation, Drop)
    result = template.tokenize(conversation)  # type: ignore[arg-type]  # a conversation
    assert isinstance(result, Drop)
    assert result.reason == DropReason.CONTROL_TOKEN
