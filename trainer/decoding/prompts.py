"""Prompts as ids: from JSONL files or named sets, through the target's own chat template."""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import ConfigError, DataError, TargetError
from trainer.acceptance import segments

logger = logging.getLogger(__name__)

_TEXTS = ("prompt", "question")
_RESERVED = (
    *("conversation", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length"),
)
"""Names that are of the call of the template, and never reach it; so are all of `return_`."""


@dataclass(frozen=True, slots=True)
class Prompt:
    place: str
    """Where it is from, for people."""

    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """What became of the rows."""

    num_prompts: int
    num_too_long: int
    """Left out: with the new tokens they would exceed the target's positions."""


class PromptEncoder:
    """The target's tokenizer, loaded when the first row needs it."""

    def __init__(self, target: Path, template_arguments: dict[str, Any]) -> None:
        """For prompts of the target in the directory `target`.

        Raises:
            ConfigError: an argument is none of a template.
        """
        for name in template_arguments:
            if name in _RESERVED or name.startswith("return_"):
                raise ConfigError(
                    f"--template-arg {name}: no argument of a chat template, but of its call. "
                    "Leave it out."
                )
        self._target = target
        self._arguments = template_arguments
        self._tokenizer: Any = None

    def encode(self, row: dict[str, Any], place: str) -> list[int]:
        """Ids of the prompt in a row: see `read_rows` for what rows there are.

        Raises:
            DataError: the row holds none, or the template refuses it.
            TargetError: the target has no tokenizer, or one without a chat template.
        """
        if "input_ids" in row:
            return _ids_of(row, place)
        messages = _messages_of(row, place)
        if self._tokenizer is None:
            self._tokenizer = self._load()
        try:
            encoded = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, **self._arguments
            )
            token_ids = [int(token) for token in encoded["input_ids"]]
        except Exception as error:  # a template is a program, and may raise anything
            text = " ".join(str(error).split())[:200]
            raise DataError(f"{place}: the target's chat template refuses it ({text}).") from error
        if not token_ids:
            raise DataError(f"{place}: the target's chat template makes no token of it.")
        return token_ids

    def _load(self) -> Any:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self._target, trust_remote_code=False, local_files_only=True
            )
        except (ValueError, OSError, ImportError, KeyError) as error:
            text = " ".join(str(error).split())[:200]
            raise TargetError(
                f"{self._target}: its tokenizer cannot be loaded ({text})."
            ) from error
        if not tokenizer.chat_template:
            raise TargetError(
                f"{self._target}: its tokenizer has no chat template. Give prompts as input_ids."
            )
        return tokenizer


def read_rows(files: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of JSONL files and the place of each.

    A row has `messages`, of which a last answer is left out; or `prompt` or `question`, a text; or
    `input_ids`, which are cut where the last answer begins if there is a `loss_mask`.

    Raises:
        DataError: a file cannot be read, or a line is no JSON object.
    """
    for file in files:
        try:
            # Not splitlines, which also cuts at characters that JSON has inside its strings.
            lines = file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file}: cannot be read ({error}).") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{file}:{number}: no JSON ({error}).") from None
            if not isinstance(row, dict):
                raise DataError(f"{file}:{number}: expected a JSON object, found {row!r:.80}.")
            yield f"{file}:{number}", row


def collect_prompts(
    rows: Iterable[tuple[str, dict[str, Any]]],
    encoder: PromptEncoder,
    *,
    limit: int | None,
    max_tokens: float,
    vocab_size: int,
) -> tuple[list[Prompt], PromptCounts]:
    """The first `limit` prompts of at most `max_tokens` tokens.

    Args:
        vocab_size: tokens that the target knows.

    Raises:
        DataError: a row holds no prompt, or one of other tokens; or none is left.
    """
    prompts: list[Prompt] = []
    num_too_long = 0
    for place, row in rows:
        if len(prompts) == limit:
            break
        token_ids = encoder.encode(row, place)
        if unknown := [token for token in token_ids if not 0 <= token < vocab_size]:
            raise DataError(
                f"{place}: token {unknown[0]} is none of the target, which has those from 0 "
                f"to {vocab_size - 1}. Give prompts of its tokenizer."
            )
        if len(token_ids) > max_tokens:
            num_too_long += 1
            logger.warning(
                "%s: left out, its %d tokens leave no room for an answer (at most %d)",
                place,
                len(token_ids),
                max_tokens,
            )
            continue
        prompts.append(Prompt(place, token_ids))
    if not prompts:
        raise DataError(f"no prompt to decode ({num_too_long} were too long).")
    return prompts, PromptCounts(len(prompts), num_too_long)


def _ids_of(row: dict[str, Any], place: str) -> list[int]:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise DataError(f"{place}: input_ids must be a list of token ids.")
    if mask is None:
        return ids
    if not isinstance(mask, list) or len(mask) != len(ids):
        raise DataError(f"{place}: loss_mask must be a list as long as input_ids.")
    if not all(isinstance(flag, int) and flag in (0, 1) for flag in mask):
        raise DataError(f"{place}: loss_mask must be of 0 and 1.")
    answers = segments(np.array(mask))
    if not answers or not answers[-1][0]:
        raise DataError(f"{place}: its loss_mask leaves no prompt before an answer.")
    return ids[: answers[-1][0]]


def _messages_of(row: dict[str, Any], place: str) -> list[dict[str, Any]]:
    for name in _TEXTS:
        if isinstance(text := row.get(name), str) and text:
            return [{"role": "user", "content": text}]
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise DataError(
            f"{place}: no prompt here (it has {', '.join(sorted(row)[:8])}). Expected messages, "
            f"{', '.join(_TEXTS)} or input_ids."
        )
    if messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1].get("role") == "assistant":
        raise DataError(f"{place}: its messages leave nothing to answer.")
    return messages
