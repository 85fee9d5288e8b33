"""A GGUF file becomes a Hugging Face directory: once, whole, and from this very file."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from cache_builder.config import TargetConfig
from cache_builder.gguf import convert_gguf
from cache_builder.target_files import describe_target
from shared.errors import TargetError
from tests.test_cache_builder.stored import Killer, tree

HIDDEN, HEADS, MIDDLE = 32, 2, 64
TEMPLATE = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"


def write_gguf(path: Path, seed: int = 0) -> Path:
    """A llama of one block with random weights and a byte-level tokenizer."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(seed)
    pieces = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(pieces))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(pieces)
    writer.add_token_types([3, *[1] * (len(pieces) - 1)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    shapes = {
        "token_embd.weight": (len(pieces), HIDDEN),
        "output.weight": (len(pieces), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_v.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (MIDDLE, HIDDEN),
        "blk.0.ffn_up.weight": (MIDDLE, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, MIDDLE),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.normal(size=shape).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The file and the directory made of it."""
    directory = tmp_path_factory.mktemp("gguf")
    gguf_file = write_gguf(directory / "tiny.gguf")
    out = directory / "deep" / "target"
    convert_gguf(gguf_file, out)
    return gguf_file, out


def test_the_directory_loads_like_any_target(converted: tuple[Path, Path]) -> None:
    _, out = converted
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == TEMPLATE
    ids = tokenizer("abc <|end|>", add_special_tokens=False, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "abc <|end|>"
    assert torch.isfinite(model(ids).logits).all()


def test_the_directory_says_what_it_was_made_from(converted: tuple[Path, Path]) -> None:
    _, out = converted
    record = json.loads((out / "source.json").read_text())
    assert (record["file"], record["quantization"]) == ("tiny.gguf", "F16")
    assert len(record["sha256"]) == 64
    assert describe_target(out, TargetConfig(path="-")).quantization == "gguf F16"
    assert [path.name for path in out.parent.iterdir()] == ["target"]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in out.iterdir())


def test_a_finished_conversion_is_left_alone(
    converted: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_builder.gguf._convert", lambda *_: pytest.fail("converted again"))
    convert_gguf(*converted)


def test_the_conversion_of_another_file_is_refused(
    converted: tuple[Path, Path], tmp_path: Path
) -> None:
    other = write_gguf(tmp_path / "tiny.gguf", seed=1)
    with pytest.raises(TargetError, match="converted from another file"):
        convert_gguf(other, converted[1])


def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf_file: Path, out: Path) -> None:
        (out / "config.json").write_text("{}")
        raise RuntimeError("killed")

    monkeypatch.setattr("cache_builder.gguf._convert", fail)
    gguf_file = write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(RuntimeError, match="killed"):
        convert_gguf(gguf_file, tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_directory_with_something_else_is_refused(tmp_path: Path) -> None:
    gguf_file = write_gguf(tmp_path / "tiny.gguf")
    out = tmp_path / "target"
    out.mkdir()
    (out / "config.json").write_text("{}")
    with pytest.raises(TargetError, match="something else than a finished conversion"):
        convert_gguf(gguf_file, out)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    with pytest.raises(TargetError, match="no such file"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "target")
    (tmp_path / "text.gguf").write_text("hello, this is not a model" * 10)
    with pytest.raises(TargetError, match="not a readable GGUF file"):
        convert_gguf(tmp_path / "text.gguf", tmp_path / "target")


def test_a_missing_package_names_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(TargetError, match=r"packages gguf\. .*pip install 'draftcache\[gguf\]'"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "target")


def test_a_conversion_that_is_killed_is_made_by_the_next_one(tmp_path: Path) -> None:
    """SIGKILL before a write: the directory is whole or absent, and nothing else stays."""
    gguf_file = write_gguf(tmp_path / "tiny.gguf")
    killer, out = Killer(convert_gguf, tmp_path), tmp_path / "out" / "target"
    total = killer.count(gguf_file, out)
    expected = tree(out)
    for part in (0.2, 0.5, 0.7, 0.9, 0.97):
        shutil.rmtree(out.parent)
        assert killer.run(gguf_file, out, kill_at=max(1, int(part * total))) == -9
        assert not out.exists() or tree(out) == expected
        convert_gguf(gguf_file, out)
        assert tree(out) == expected
        assert [path.name for path in out.parent.iterdir()] == ["target"]
