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

from cache_builder.answer_file import KEY, AnswerFile
from cache_builder.answer_progress import AnswerProgress
from cache_builder.conversation import Conversation
from cache_builder.exchange import Exchange
from cache_builder.generation import Sampling
from cache_builder.prompts import PromptCounts, read_prompts
from cache_builder.record import parse_record
from cache_builder.rendering import message_fields
from cache_builder.sources import find_files
from cache_builder.template import ChatTemplate, MaskedTokens

logger = logging.getLogger(__name__)


class Answerer(Protocol):
    """Answers conversations to their end."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def answer(
        self, exchanges: Iterator[Exchange], sampling: Sampling
    ) -> Iterator[list[Exchange]]: ...


@dataclass(slots=True)
class RegenerateReport:
    prompts: PromptCounts = field(default_factory=PromptCounts)
    num_answered: int = 0
    num_failed: int = 0
    """Not answered and not written: left to the next run."""

    finish_reasons: Counter[str] = field(default_factory=Counter)
    """Of every answer, also of those in the middle of a conversation."""

    retries: Counter[str] = field(default_factory=Counter)
    """Requests to a server that were made again, by status or by what happened."""

    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_turns_left_out: int = 0
    """Turns behind an answer that did not end, or whose prompt would be too long."""

    num_unsupervised_turns: int = 0
    """Earlier answers that the prompt of a later turn does not hold as they were generated."""

    num_ids_needed: int = 0
    """Rows whose text does not give their ids back."""

    num_text_only: int = 0
    """Rows without ids, since the server gave none."""

    num_other_prompts: int = 0
    """Answers to a prompt that the server rendered differently than our template."""

    num_without_end: int = 0
    """Ended answers whose ids lack the end token."""

    def add(self, exchange: Exchange) -> None:
        """Count a conversation that was answered."""
        self.num_answered += 1
        for answer in exchange.answers:
            self.finish_reasons[answer.finish_reason] += 1
            self.num_new_tokens += answer.num_new_tokens
        self.num_prompt_tokens += exchange.num_prompt_tokens
        self.num_turns_left_out += exchange.num_turns_left_out
        self.num_unsupervised_turns += exchange.num_unsupervised_turns
        self.num_other_prompts += exchange.num_other_prompts
        self.num_without_end += exchange.num_without_end
        self.num_text_only += exchange.token_ids is None


def regenerate(
    answerer: Answerer,
    template: ChatTemplate,
    sources: Sequence[str],
    out: Path,
    *,
    generated_by: str,
    rendered_by: str,
    sampling: Sampling,
    max_length: int,
    unset: str | None = None,
    limit: int | None = None,
    omit_ids: bool = False,
) -> RegenerateReport:
    """Answer every prompt of `sources` that `out` does not hold yet, and append the answers.

    Each assistant turn of a conversation is generated in its place, on top of the ones generated
    before. Stopped at any moment, the same call goes on behind what is written. Prompts are read
    as they are needed: memory holds 16 bytes (as a Python object, about 100) of each.

    Args:
        rendered_by: stands for tokenizer and template, whose arguments are written as they are.
        max_length: tokens of a prompt together with `sampling.max_new_tokens` at most.
        unset: who decides what `sampling` does not name; written into the rows.
        limit: prompts to answer at most, those in `out` included.
        omit_ids: leave ids and mask out of rows whose text gives exactly them back.

    Raises:
        DataError: a file cannot be read, or `out` holds rows of other settings.
        EndpointError: the server of the target answers none any more.
    """
    report = RegenerateReport()
    settings = asdict(sampling) | ({"unset": unset} if unset else {})
    origin = {"generated_by": generated_by, "rendered_by": rendered_by, "sampling": settings}
    if template.arguments:
        origin["chat_template_kwargs"] = template.arguments
    files = [file for source in sources for file in find_files(source)]
    max_prompt_tokens = max_length - sampling.max_new_tokens
    with AnswerFile(out, origin) as answers, AnswerProgress(files, limit) as progress:
        prompts = read_prompts(
            files,
            template,
            answers,
            report.prompts,
            max_prompt_tokens=max_prompt_tokens,
            limit=limit,
        )
        exchanges = (
            Exchange(
                prompt, template, eos_ids=answerer.eos_ids, max_prompt_tokens=max_prompt_tokens
            )
            for prompt in prompts
        )
        for ended in answerer.answer(exchanges, sampling):
            answers.append(
                _row(exchange, origin, template, omit_ids, report)
                for exchange in ended
                if exchange.failure is None
            )
            for exchange in ended:
                _count(exchange, report)
            progress.show(report.prompts, report)
    return report


def _count(exchange: Exchange, report: RegenerateReport) -> None:
    for kind in exchange.retries.keys() - report.retries.keys():
        logger.warning("%s: asked again, now and whenever it happens again", kind)
    report.retries += exchange.retries
    if exchange.failure is None:
        report.add(exchange)
    else:
        report.num_failed += 1
        logger.warning("%s: not answered: %s", exchange.prompt.place, exchange.failure)


def rows(report: RegenerateReport) -> list[tuple[str, str]]:
    """The report as lines of a table."""
    prompts = report.prompts
    lines = [
        ("rows", f"{prompts.num_rows:,}"),
        ("answered before", f"{prompts.num_present:,}"),
        ("answered now", f"{report.num_answered:,}"),
        ("not answered", f"{report.num_failed:,}"),
        ("same prompt again", f"{prompts.num_duplicates:,}"),
        ("new tokens", f"{report.num_new_tokens:,} (prompts {report.num_prompt_tokens:,})"),
        ("text only, no ids", f"{report.num_text_only:,}"),
        ("ids differ from the text's", f"{report.num_ids_needed:,}"),
        ("turns left out", f"{report.num_turns_left_out:,}"),
        ("turns without supervision", f"{report.num_unsupervised_turns:,}"),
    ]
    if report.num_other_prompts:
        lines.append(("prompts not as our template", f"{report.num_other_prompts:,}"))
    if report.num_without_end:
        lines.append(("ended without end token", f"{report.num_without_end:,}"))
    lines += [(f"finish reason {name}", f"{n:,}") for name, n in report.finish_reasons.items()]
    lines += [(f"retried: {name}", f"{n:,}") for name, n in report.retries.items()]
    lines += [(f"dropped: {name}", f"{n:,}") for name, n in prompts.dropped.items()]
    return lines


def _row(
    exchange: Exchange,
    origin: Mapping[str, Any],
    template: ChatTemplate,
    omit_ids: bool,
    report: RegenerateReport,
) -> dict[str, Any]:
    prompt = exchange.prompt
    reason = exchange.answers[-1].finish_reason
    row = {**prompt.carried, KEY: prompt.key.hex(), **origin, "finish_reason": reason}
    if prompt.conversation.tools:
        row["tools"] = list(prompt.conversation.tools)
    row["messages"] = message_fields(exchange.messages, verbatim=True)
    if exchange.token_ids is None:
        return row
    is_needed = not _gives_back(row, exchange.token_ids, exchange.loss_mask, template)
    report.num_ids_needed += is_needed
    if is_needed or not omit_ids:
        row |= {"input_ids": exchange.token_ids, "loss_mask": exchange.loss_mask}
    return row


def _gives_back(
    row: dict[str, Any], token_ids: list[int], loss_mask: list[int], template: ChatTemplate
) -> bool:
    """Whether tokenizing the text of `row` gives what the target saw and produced.

    Some templates write a line break behind the end of the last answer. It is nobody's.
    """
    conversation = parse_record(json.loads(json.dumps(row)))
    if not isinstance(conversation, Conversation):
        return False
    tokens = template.tokenize(conversation)
    size = len(token_ids)
    return (
        isinstance(tokens, MaskedTokens)
        and np.array_equal(tokens.token_ids[:size], token_ids)
        and np.array_equal(tokens.loss_mask[:size], loss_mask)
        and not tokens.loss_mask[size:].any()
    )
