"""A GGUF file as a target: converted once to a Hugging Face directory."""

import importlib.util
import json
import logging
from collections import Counter
from pathlib import Path

from shared.errors import TargetError
from shared.files import commit_directory, sha256_file, staging_directory, write_json, writing

RECORD = "source.json"
"""File in the directory that says what it was made from. Its presence means complete."""

logger = logging.getLogger(__name__)


def convert_gguf(gguf_file: Path, out: Path) -> None:
    """Write the model in `gguf_file` to the directory `out`, dequantized to bfloat16.

    Whole or absent: `out` appears in one step. If it already holds the conversion of this very
    file, nothing is done.

    Raises:
        TargetError: the file cannot be read, `out` holds something else, or a package is missing.
    """
    if not gguf_file.is_file():
        raise TargetError(f"{gguf_file}: no such file. Expected a model in GGUF format.")
    digest = sha256_file(gguf_file)
    if _is_converted(out, digest):
        return
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise TargetError(
            f"{gguf_file}: reading GGUF needs the packages {' and '.join(missing)}. "
            "Install them with: pip install 'draftcache[gguf]'"
        )
    quantization = _quantization(gguf_file)
    logger.info("converting %s (%s) to %s", gguf_file, quantization, out)
    with staging_directory(out) as staging, writing(out):
        if _is_converted(out, digest):
            return  # another process was faster
        partial = staging / "new"
        partial.mkdir()
        _convert(gguf_file, partial)
        record = {"file": gguf_file.name, "sha256": digest, "quantization": quantization}
        write_json(partial / RECORD, record)
        _make_readable(partial)
        commit_directory(partial, out)


def _is_converted(out: Path, digest: str) -> bool:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        found = json.loads((out / RECORD).read_text())["sha256"]
    except (OSError, ValueError, LookupError, TypeError):
        raise TargetError(
            f"{out}: holds something else than a finished conversion. Remove it or choose another "
            "directory."
        ) from None
    if found != digest:
        raise TargetError(
            f"{out}: converted from another file (sha256 {found[:16]}, expected {digest[:16]}). "
            "Remove it or choose another directory."
        )
    return True


def _make_readable(directory: Path) -> None:
    """Give the files usual rights: some come from temporary files that only we may read."""
    directory.chmod(0o755)
    for path in directory.iterdir():
        path.chmod(0o644)


def _quantization(gguf_file: Path) -> str:
    """Name of the type that holds most of the file's bytes, such as `Q4_1`."""
    from gguf import GGUFReader

    try:
        tensors = GGUFReader(gguf_file).tensors
    except (ValueError, LookupError, OSError) as error:
        raise TargetError(f"{gguf_file}: not a readable GGUF file ({error}).") from error
    num_bytes: Counter[str] = Counter()
    for tensor in tensors:
        num_bytes[tensor.tensor_type.name] += int(tensor.n_bytes)
    if not num_bytes:
        raise TargetError(f"{gguf_file}: holds no tensors. Expected a whole model.")
    return num_bytes.most_common(1)[0][0]


def _convert(gguf_file: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place = {"gguf_file": gguf_file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, **place)
        model = AutoModelForCausalLM.from_pretrained(
            gguf_file.parent,
            **place,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
    except (ValueError, LookupError, OSError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise TargetError(f"{gguf_file}: transformers cannot load it ({reason}).") from error
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
