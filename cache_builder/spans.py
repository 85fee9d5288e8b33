"""Where the answers of a conversation lie in its rendering, in characters.

A span is proven by the template's generation markers, else by the rendering of each prompt being a
prefix of the whole, else (a template that rewrites history) by the generation prompt occurring
exactly once per answer. What is not proven is refused. Every failed
look-up is a refusal too: nothing is found by the pattern of one model family.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from cache_builder.conversation import (
    THINK_CLOSE,
    THINK_OPEN,
    DropReason,
    Message,
    RowRefusedError,
)
from shared.quantity import count

THINK_TAIL = re.compile(rf"{THINK_OPEN}\s*(?:{THINK_CLOSE}\s*)?\Z")
"""What a generation prompt may hold of a think block: the opening tag, or an empty block."""

OPEN_THINK = re.compile(rf"{THINK_OPEN}\s*\Z")
"""The end of a generation prompt that opens a think block."""

Render = Callable[[int, bool], str | None]
"""Renders the first n messages, with or without generation prompt. None: the template refuses."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where one answer lies at most."""

    header: int
    """End of the generation prompt without its part of a think block."""

    start: int
    """End of the generation prompt."""

    limit: int
    """The answer and its end-of-turn token end here at the latest."""

    ends: Literal["limit", "stop", "any"]
    """How it ends without an end-of-turn token in it. `limit`: there. `any`: before the white space
    there. `stop`: the same, but nothing else may follow the answer."""


def marked_spans(
    text: str, marks: Sequence[tuple[int, int]], turns: Sequence[int], render: Render
) -> list[Span]:
    """Spans from the template's generation markers, less what the prompt already holds."""
    if len(marks) != len(turns):
        raise RowRefusedError(
            DropReason.MASK_NOT_PROVABLE,
            f"the template marks {count(len(marks), 'generation')} for "
            f"{count(len(turns), 'answer')}",
        )
    spans = []
    for turn, (start, limit) in zip(turns, marks, strict=True):
        prompt = render(turn, True) or ""
        if text.startswith(prompt):
            start = max(start, min(len(prompt), limit))
        elif turn == turns[-1] and text.startswith(prompt[: _header(prompt, len(prompt))]):
            raise _mode_mismatch(prompt)
        spans.append(Span(_header(text, start), start, limit, "limit"))
    return spans


def prefix_spans(text: str, turns: Sequence[int], render: Render) -> list[Span] | None:
    """Spans behind each rendered prompt. None: one of them is not a prefix of the whole.

    A span ends with the rendering that ends with its answer, where that is a prefix too, else at
    the next prompt: the template closes or rewrites earlier turns in another way.
    """
    prompts = [render(turn, True) for turn in turns]
    spans = []
    for i, (turn, prompt) in enumerate(zip(turns, prompts, strict=True)):
        if not prompt or not text.startswith(prompt):
            return None
        start = len(prompt)
        answered = render(turn + 1, False)
        if answered and answered.startswith(prompt) and text.startswith(answered):
            spans.append(Span(_header(text, start), start, len(answered), "any"))
        else:
            following = prompts[i + 1] if i + 1 < len(prompts) else text
            spans.append(Span(_header(text, start), start, len(following or text), "stop"))
    return spans


def occurrence_spans(
    text: str, messages: Sequence[Message], turns: Sequence[int], render: Render
) -> list[Span]:
    """Spans behind each occurrence of the generation prompt, which must be one per answer."""
    prompt = _generation_prompt(turns[-1], render) or _generation_prompt(len(messages), render)
    header = THINK_TAIL.sub("", prompt) or prompt
    places = [match.start() for match in re.finditer(re.escape(header), text)] if header else []
    if len(places) != len(turns):
        raise RowRefusedError(
            DropReason.MASK_NOT_PROVABLE,
            f"the template rewrites history, and its generation prompt {header!r} occurs "
            f"{count(len(places), 'time')} for {count(len(turns), 'answer')}",
        )
    if any(header.strip() in message.content + (message.reasoning or "") for message in messages):
        raise RowRefusedError(
            DropReason.MASK_NOT_PROVABLE,
            f"the template rewrites history, and a message holds the generation prompt {header!r}",
        )
    if not text.startswith(prompt, places[-1]):
        raise _mode_mismatch(prompt)
    spans = []
    for place, limit in zip(places, [*places[1:], len(text)], strict=True):
        matched = prompt if text.startswith(prompt, place) else header
        spans.append(Span(place + len(header), place + len(matched), limit, "stop"))
    return spans


def _header(text: str, start: int) -> int:
    tail = THINK_TAIL.search(text[max(0, start - 64) : start])
    return start - len(tail.group()) if tail else start


def _mode_mismatch(prompt: str) -> RowRefusedError:
    return RowRefusedError(
        DropReason.MODE_MISMATCH,
        f"the answer does not follow the generation prompt {prompt[-60:]!r} of these template "
        "arguments: it was generated with others",
    )


def _generation_prompt(num_messages: int, render: Render) -> str:
    """What the template adds for the target to continue from."""
    without, with_prompt = render(num_messages, False), render(num_messages, True)
    if without is None or with_prompt is None or not with_prompt.startswith(without):
        return ""
    return with_prompt[len(without) :]
