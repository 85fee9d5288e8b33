"""The documents name messages, commands and settings that there are."""

import ast
import dataclasses
import re
import shlex
from collections.abc import Iterator

import click
import pytest

from cache_builder.cli import main as cache_builder
from cache_builder.config import BuildConfig
from shared import config
from shared.errors import ConfigError
from tests.conftest import REPOSITORY
from trainer.cli import main as trainer
from trainer.config import TrainConfig

README = (REPOSITORY / "README.md").read_text()
FORMAT = (REPOSITORY / "shared" / "FORMAT.md").read_text()
GROUPS = {"cache-builder": cache_builder, "trainer": trainer}
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
CODE = re.compile(r"(`+) ?(.+?) ?\1", re.DOTALL)
FILES = {"cache.json"}
"""No setting, though there is a section of that name."""


def spans(text: str) -> list[str]:
    """What a text has between backticks, without its blocks."""
    return [" ".join(found[2].split()) for found in CODE.finditer(BLOCK.sub("", text))]


def messages() -> list[str]:
    """Every text in the sources but docstrings; a star for what is filled in."""
    found = []
    for package in ("cache_builder", "shared", "trainer"):
        for path in (REPOSITORY / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            said = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
            for node in ast.walk(tree):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                texts = [p.value if isinstance(p, ast.Constant) else "*" for p in parts]
                if id(node) not in said and any(isinstance(p, ast.Constant) for p in parts):
                    found.append("".join(map(str, texts)))
    return found


def test_the_messages_that_the_readme_explains_are_said() -> None:
    """`N` and `...` stand for anything."""
    table = README.partition("| message | cause | remedy |")[2].partition("\n\n")[0]
    cells = [row.split(" | ")[0] for row in table.splitlines()[2:]]
    explained = [fragment for cell in cells for fragment in spans(cell)]
    assert len(explained) > 60
    said = "\n".join(text.replace("\n", " ") for text in messages())
    missing = []
    for fragment in explained:
        words = re.split(r"\.\.\.|\bN\b", fragment)
        if not re.search(".*".join(re.escape(word.strip()) for word in words), said):
            missing.append(fragment)
    assert not missing


def commands(text: str) -> Iterator[list[str]]:
    """The words of each of our commands in the blocks of a text."""
    for language, block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines() if language == "sh" else []:
            if found := re.search(r"(?:^|-m |-- +)(cache-builder|trainer) .*", line):
                yield shlex.split(found[0].removeprefix("-m ").removeprefix("--"), comments=True)


def test_the_commands_that_are_shown_are_understood() -> None:
    shown = list(commands(README))
    assert len(shown) > 10
    for program, name, *arguments in shown:
        GROUPS[program].commands[name].make_context(name, arguments)


@pytest.mark.parametrize("text", [README, FORMAT], ids=["README", "FORMAT"])
def test_the_options_that_are_named_are_there(text: str) -> None:
    options = {
        name: {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
        for group in GROUPS.values()
        for name, command in group.commands.items()
    }
    for code in spans(text):
        found = re.match(r"(cache-builder|trainer) ([\w-]+)", code)
        if found is not None:
            assert isinstance(GROUPS[found[1]].commands.get(found[2]), click.Command), code
            wrong = set(re.findall(r"(?<!\S)--?[a-z][\w-]*", code)) - options[found[2]]
            assert not wrong, code


def is_setting(key: str) -> bool:
    for schema in (BuildConfig, TrainConfig):
        try:
            config.kind_of(schema, key)
        except ConfigError:
            continue
        return True
    return False


def test_the_settings_that_are_named_are_there() -> None:
    sections = {f.name for schema in (BuildConfig, TrainConfig) for f in dataclasses.fields(schema)}
    named = {
        key
        for code in spans(README)
        for key in re.findall(r"(?<![\w./-])([a-z]+(?:\.[a-z_]+)+)(?![\w./*])", code)
        if key.partition(".")[0] in sections
    } - FILES
    assert len(named) > 30
    assert not [key for key in sorted(named) if not is_setting(key)]
