"""Let the target answer the prompts of a dataset: a drafter learns from its target's own text.

Rows come out with the ids that the target saw and produced, since text does not always
tokenize back to them.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from cache_builder.answer_file import KEY, AnswerFile
from cache_builder.conversation import Conversation, Drop, Message, RowRefusedError
from cache_builder.generation import Answer, Sampling
from cache_builder.record import parse_prompt, parse_record
from cache_builder.sources import find_files, read_rows
from cache_builder.template import ChatTemplate, MaskedTokens
from shared.errors import DataError
from shared.files import canonical_json, sha256_bytes

REPLACED_KEYS = frozenset(
    {
        *("messages", "conversations", "prompt", "response", "text", "system", "tools"),
        *("input_ids", "loss_mask", "finished", "finish_reason", "answered_by", "generated_by"),
        *("sampling", "chat_template_kwargs"),
    }
)
"""Keys of a row that are written anew. Every other key is carried over."""

_WINDOW_BATCHES = 16
"""Batches that are sorted by length together: less padding, and results not long in coming."""

logger = logging.getLogger(__name__)


class Generator(Protocol):
    """Answers prompts given as ids."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Answer]: ...


@dataclass(slots=True)
class RegenerateReport:
    num_rows: int = 0
    num_present: int = 0
    """Answered by an earlier run into the same file."""

    num_answered: int = 0
    num_duplicates: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    """Of every answer, also of those in the middle of a conversation."""

    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_turns_left_out: int = 0
    """Turns behind an answer that hit the limit."""

    num_unsupervised_turns: int = 0
    """Earlier answers that the prompt of a later turn does not hold as they were generated."""

    num_ids_needed: int = 0
    """Rows whose text does not give their ids back."""


@dataclass(frozen=True, eq=False, slots=True)
class _Prompt:
    key: str
    row: dict[str, Any]
    conversation: Conversation
    first_ids: tuple[int, ...]
    """Ids up to the first answer."""


def regenerate(
    generator: Generator,
    template: ChatTemplate,
    sources: Sequence[str],
    out: Path,
    *,
    generated_by: str,
    sampling: Sampling,
    batch_size: int,
    max_length: int,
    limit: int | None = None,
    omit_ids: bool = False,
) -> RegenerateReport:
    """Answer every prompt of `sources` that `out` does not hold yet, and append the answers.

    Each assistant turn of a conversation is generated in its place, on top of the ones generated
    before. Stopped at any moment, the same call goes on behind the last batch.

    Args:
        max_length: tokens of a prompt together with `sampling.max_new_tokens` at most.
        limit: prompts to answer at most, those in `out` included.
        omit_ids: leave ids and mask out of rows whose text gives exactly them back.

    Raises:
        DataError: a file cannot be read, or `out` holds rows of other settings.
    """
    report = RegenerateReport()
    origin = {"generated_by": generated_by, "sampling": asdict(sampling)}
    files = [file for source in sources for file in find_files(source)]
    with AnswerFile(out, origin) as answers:
        prompts = list(
            _read_prompts(files, template, answers.keys, report, sampling, max_length, limit)
        )
        with tqdm(total=len(prompts), desc="answer", unit="row", disable=None) as bar:
            for batch in _batches(prompts, batch_size):
                rows = _answer(generator, template, batch, sampling, report)
                answers.append(
                    _row(prompt, made, origin, template, omit_ids, report)
                    for prompt, made in zip(batch, rows, strict=True)
                )
                report.num_answered += len(batch)
                bar.update(len(batch))
                bar.set_postfix(new_tokens=report.num_new_tokens)
    return report


def rows(report: RegenerateReport) -> list[tuple[str, str]]:
    """The report as lines of a table."""
    lines = [
        ("rows", f"{report.num_rows:,}"),
        ("answered before", f"{report.num_present:,}"),
        ("answered now", f"{report.num_answered:,}"),
        ("same prompt again", f"{report.num_duplicates:,}"),
        ("new tokens", f"{report.num_new_tokens:,} (prompts {report.num_prompt_tokens:,})"),
        ("ids differ from the text's", f"{report.num_ids_needed:,}"),
        ("turns left out", f"{report.num_turns_left_out:,}"),
        ("turns without supervision", f"{report.num_unsupervised_turns:,}"),
    ]
    lines += [(f"finish reason {name}", f"{n:,}") for name, n in report.finish_reasons.items()]
    lines += [(f"dropped: {name}", f"{n:,}") for name, n in report.dropped.items()]
    return lines


def _read_prompts(
    files: Sequence[Path],
    template: ChatTemplate,
    present: set[str],
    report: RegenerateReport,
    sampling: Sampling,
    max_length: int,
    limit: int | None,
) -> Iterator[_Prompt]:
    seen: set[str] = set()
    for file in files:
        for number, row in read_rows(file):
            if limit is not None and len(seen) >= limit:
                return
            report.num_rows += 1
            conversation = parse_prompt(row)
            try:
                if isinstance(conversation, Drop):
                    raise RowRefusedError(conversation.reason, conversation.detail)
                template.require_no_control_token(conversation)
                first = conversation.messages[: _first_answer(conversation.messages)]
                ids = tuple(template.prompt_ids(first, conversation.tools).tolist())
            except RowRefusedError as error:
                report.dropped[error.drop.reason] += 1
                logger.warning("%s:%d: %s (%s)", file, number, error.drop.reason, error)
                continue
            if len(ids) + sampling.max_new_tokens > max_length:
                report.dropped["too_long"] += 1
                logger.warning("%s:%d: the prompt has %d tokens", file, number, len(ids))
                continue
            key = _key(conversation)
            if key in seen:
                report.num_duplicates += 1
                continue
            seen.add(key)
            if key in present:
                report.num_present += 1
                continue
            yield _Prompt(key, row, conversation, ids)
    if not report.num_rows:
        raise DataError(f"{', '.join(map(str, files))}: no rows.")


def _key(conversation: Conversation) -> str:
    asked = [[m.role, m.content, dict(m.fields)] for m in conversation.messages]
    return sha256_bytes(canonical_json([asked, [dict(t) for t in conversation.tools]]))[:32]


def _batches(prompts: Sequence[_Prompt], size: int) -> Iterator[list[_Prompt]]:
    window = size * _WINDOW_BATCHES
    for start in range(0, len(prompts), window):
        ordered = sorted(prompts[start : start + window], key=lambda prompt: len(prompt.first_ids))
        for first in range(0, len(ordered), size):
            yield ordered[first : first + size]


@dataclass(eq=False, slots=True)
class _Made:
    """One conversation while it is generated."""

    messages: list[Message]
    """Up to the last answer that exists."""

    token_ids: list[int]
    loss_mask: list[int]
    finish_reason: str


def _answer(
    generator: Generator,
    template: ChatTemplate,
    batch: Sequence[_Prompt],
    sampling: Sampling,
    report: RegenerateReport,
) -> list[_Made]:
    made = [_Made([], [], [], "stop") for _ in batch]
    open_ = list(range(len(batch)))
    while open_:
        prompts: list[list[int]] = []
        for i in open_:
            asked = batch[i].conversation.messages
            ahead = asked[len(made[i].messages) :]
            made[i].messages += ahead[: _first_answer(ahead)]
            ids = template.prompt_ids(made[i].messages, batch[i].conversation.tools).tolist()
            prompts.append(ids)
        for i, ids, answer in zip(
            open_, prompts, generator.generate(prompts, sampling), strict=True
        ):
            _extend(made[i], ids, answer, report)
            said = list(answer.token_ids)
            if said and said[-1] in generator.eos_ids:
                said.pop()
            made[i].messages.append(Message(role="assistant", content=template.decode(said)))
            report.finish_reasons[answer.finish_reason] += 1
            report.num_prompt_tokens += len(ids)
            report.num_new_tokens += len(answer.token_ids)
        still = []
        for i in open_:
            left = len(batch[i].conversation.messages) - len(made[i].messages)
            if left and made[i].finish_reason == "stop":
                still.append(i)
            elif left:
                report.num_turns_left_out += left // 2
        open_ = still
    return made


def _extend(made: _Made, prompt: list[int], answer: Answer, report: RegenerateReport) -> None:
    """Make `made` the tokens of `prompt` and `answer`; earlier answers stay supervised if whole."""
    is_continued = prompt[: len(made.token_ids)] == made.token_ids
    mask = made.loss_mask if is_continued else []
    report.num_unsupervised_turns += not is_continued
    made.token_ids = prompt + list(answer.token_ids)
    made.loss_mask = mask + [0] * (len(prompt) - len(mask)) + [1] * len(answer.token_ids)
    made.finish_reason = answer.finish_reason


def _row(
    prompt: _Prompt,
    made: _Made,
    origin: Mapping[str, Any],
    template: ChatTemplate,
    omit_ids: bool,
    report: RegenerateReport,
) -> dict[str, Any]:
    conversation = prompt.conversation
    row = {key: value for key, value in prompt.row.items() if key not in REPLACED_KEYS}
    row |= {KEY: prompt.key, **origin, "finish_reason": made.finish_reason}
    if conversation.tools:
        row["tools"] = list(conversation.tools)
    if template.arguments:
        row["chat_template_kwargs"] = template.arguments
    row["messages"] = [
        {"role": message.role, "content": message.content, **message.fields}
        for message in made.messages
    ]
    is_needed = not _gives_back(row, made, template)
    report.num_ids_needed += is_needed
    if is_needed or not omit_ids:
        row |= {"input_ids": made.token_ids, "loss_mask": made.loss_mask}
    return row


def _gives_back(row: dict[str, Any], made: _Made, template: ChatTemplate) -> bool:
    """Whether tokenizing the text of `row` gives what the target saw and produced.

    Some templates write a line break behind the end of the last answer. It is nobody's.
    """
    conversation = parse_record(json.loads(json.dumps(row)))
    if not isinstance(conversation, Conversation):
        return False
    tokens = template.tokenize(conversation)
    size = len(made.token_ids)
    return (
        isinstance(tokens, MaskedTokens)
        and np.array_equal(tokens.token_ids[:size], made.token_ids)
        and np.array_equal(tokens.loss_mask[:size], made.loss_mask)
        and not tokens.loss_mask[size:].any()
    )


def _first_answer(messages: Sequence[Message]) -> int:
    return next(i for i, message in enumerate(messages) if message.role == "assistant")
