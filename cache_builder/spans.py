"""Where the answers of a conversation lie in its rendering, in characters.

A span is proven by the template's generation markers, else by the rendering of each prompt and of
each answered prompt being a prefix of the whole, else (a template that rewrites history) by the
generation prompt occurring exactly once per answer. What is not proven is refused. Every failed
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
from cache_builder.encoding import Stop

THINK_TAIL = re.compile(rf"{THINK_OPEN}\s*(?:{THINK_CLOSE}\s*)?\Z")
"""What a generation prompt may hold of a think block: the opening tag, or an empty block."""

EMPTY_THINK = re.compile(rf"\s*{THINK_OPEN}\s*{THINK_CLOSE}\n{{0,2}}")

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
    """Where it ends if no end-of-turn token is in it. `limit`: there. `text`: with its last letter.
    `nothing`: the same, but nothing may follow."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target generated in one turn."""

    start: int
    end: int
    is_unthinking: bool
    """The template wrote an empty think block that the record does not have."""


def marked_spans(
    text: str, marks: Sequence[tuple[int, int]], turns: Sequence[int], render: Render
) -> list[Span]:
    """Spans from the template's generation markers, less what the prompt already holds."""
    if len(marks) != len(turns):
        raise RowRefusedError(
            DropReason.MASK_NOT_PROVABLE,
            f"the template marks {len(marks)} generations for {len(turns)} answers",
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
    """Spans between each rendered prompt and the rendering that ends with its answer.

    None: one of them is not a prefix of the whole, so the template rewrites history.
    """
    spans = []
    for turn in turns:
        prompt, answered = render(turn, True), render(turn + 1, False)
        if not prompt or not answered or not text.startswith(answered):
            return None
        if not answered.startswith(prompt):
            return None
        start = len(prompt)
        spans.append(Span(_header(text, start), start, len(answered), "any"))
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
            f"{len(places)} times for {len(turns)} answers",
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


def locate_answer(
    text: str, span: Span, message: Message, stops: Sequence[Stop], *, is_last: bool, is_cut: bool
) -> Answer | None:
    """What of `span` the target generated. None: an earlier turn without its recorded reasoning.

    With `is_cut` the target did not end the turn: the answer ends with its last character.

    Raises:
        RowRefusedError: reasoning, answer or tool calls are not where they must be.
    """
    start, said = span.start, span.header
    is_unthinking = False
    if message.reasoning:
        said = text.find(message.reasoning.strip(), span.header, span.limit)
        if said < 0 and not is_last:
            return None
        if said < 0:
            raise RowRefusedError(
                DropReason.THINKING_NOT_RENDERED, "the template leaves out the reasoning"
            )
        said += len(message.reasoning.strip())
    elif block := EMPTY_THINK.match(text, span.header, span.limit):
        # A block that the prompt has begun is the prompt's, unless the record has it too.
        is_unthinking = message.reasoning is None and THINK_CLOSE in text[start : block.end()]
        start = block.end() if is_unthinking else start
    elif message.reasoning is not None and not is_last:
        return None
    said = _skip(text, message.content.strip(), max(start, said), span.limit)
    for name in message.tool_names:
        said = _skip(text, name, said, span.limit)
    stop = _find_stop(span, stops, said, has_calls=bool(message.tool_calls))
    if stop is not None:
        end = stop.end
    elif span.ends == "limit":
        end = span.limit
    elif span.ends == "stop" and text[said : span.limit].strip():
        raise RowRefusedError(
            DropReason.MASK_NOT_PROVABLE, "no end-of-turn token follows the answer"
        )
    else:
        # White space behind the last letter is the template's, but for what the answer ends in.
        end = len(text[: span.limit].rstrip())
        tail = message.content[len(message.content.rstrip()) :]
        end += len(tail) if text.startswith(tail, end, span.limit) else 0
    if is_cut:
        end = _cut(text, message, start, stop.start if stop else end)
    _check_tags(text[span.header : end], message, is_last=is_last, is_cut=is_cut)
    return Answer(start, end, is_unthinking)


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


def _skip(text: str, part: str, start: int, limit: int) -> int:
    """End of `part`, which must follow `start`."""
    found = text.find(part, start, limit)
    if found < 0:
        raise RowRefusedError(
            DropReason.MASK_NOT_PROVABLE,
            f"the template leaves out or rewrites {part[:40]!r} of the answer",
        )
    return found + len(part)


def _find_stop(span: Span, stops: Sequence[Stop], said: int, *, has_calls: bool) -> Stop | None:
    """The token that ends the turn: the first eos behind the answer, else a special token."""
    behind = [stop for stop in stops if stop.start >= said and stop.end <= span.limit]
    if eos := [stop for stop in behind if stop.is_eos]:
        return eos[0]
    if has_calls and span.ends == "stop":
        return None
    return (behind[-1] if has_calls else behind[0]) if behind else None


def _cut(text: str, message: Message, start: int, end: int) -> int:
    """Where the text of a cut-off answer ends, before whatever the template closes it with."""
    if message.tool_calls:
        return end
    body, said = text[start:end], message.content or message.reasoning or ""
    if not message.content:
        body = body.rstrip().removesuffix(THINK_CLOSE)
    if body.endswith(said):
        return start + len(body)
    body = body.rstrip()
    if not body.endswith(said.rstrip()):
        raise RowRefusedError(
            DropReason.MASK_NOT_PROVABLE, "the end of the cut-off answer cannot be located"
        )
    return start + len(body)


def _check_tags(rendered: str, message: Message, *, is_last: bool, is_cut: bool) -> None:
    """A thinking turn has one block, closed unless the answer was cut off inside it."""
    if message.reasoning is None:
        return
    tags = rendered.count(THINK_OPEN), rendered.count(THINK_CLOSE)
    allowed = {(1, 1)}
    if message.reasoning or not is_last:
        allowed.add((0, 0))  # another template's way of marking thoughts, or history without them
    if is_cut and not message.content:
        allowed.add((1, 0))
    if tags not in allowed:
        raise RowRefusedError(
            DropReason.THINKING_NOT_RENDERED,
            f"the rendered turn has {tags[0]} opening and {tags[1]} closing think tags",
        )
