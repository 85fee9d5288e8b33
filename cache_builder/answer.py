"""What the target generated in one turn: from the prompt's end to the end-of-turn token.

Reasoning, answer and tool calls must all be found in the rendered turn, in this order. An answer
that hit the token limit has no end-of-turn token: the target did not produce one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cache_builder.conversation import (
    THINK_CLOSE,
    THINK_OPEN,
    DropReason,
    Message,
    RowRefusedError,
)
from cache_builder.encoding import Stop
from cache_builder.spans import Span

EMPTY_THINK = re.compile(rf"\s*{THINK_OPEN}\s*{THINK_CLOSE}\n{{0,2}}")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target generated in one turn."""

    start: int
    end: int
    is_unthinking: bool
    """The template wrote an empty think block that the record does not have."""


def locate_answer(
    text: str,
    span: Span,
    message: Message,
    stops: Sequence[Stop],
    *,
    eos_id: int | None,
    is_last: bool,
    is_cut: bool,
    is_thought_left_out: bool,
) -> Answer | None:
    """What of `span` the target generated. None: an earlier turn without its recorded reasoning.

    With `is_cut` the target did not end the turn: the answer ends with its last character. With
    `is_thought_left_out` the template writes the same without the reasoning, whose words may be
    those of the answer all the same.

    Raises:
        RowRefusedError: reasoning, answer or tool calls are not where they must be.
    """
    start, said = span.start, span.header
    is_unthinking = False
    if message.reasoning:
        said = -1
        if not is_thought_left_out:
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
    stop = _find_stop(span, stops, said, eos_id, has_calls=bool(message.tool_calls))
    if span.ends == "stop":
        _check_turn(text, span, message, stops, said, stop)
    if stop is not None and not message.tool_calls:
        _check_place(text[stop.end : span.limit], message.content.strip(), span)
    if stop is not None:
        end = stop.end
    elif span.ends == "limit":
        end = span.limit
    else:
        # White space behind the last letter is the template's, but for what the answer ends in.
        end = len(text[: span.limit].rstrip())
        tail = message.content[len(message.content.rstrip()) :]
        end += len(tail) if text.startswith(tail, end, span.limit) else 0
    if is_cut:
        end = _cut(text, message, start, stop.start if stop else end)
    _check_tags(text[span.header : end], message, is_last=is_last, is_cut=is_cut)
    return Answer(start, end, is_unthinking)


def _skip(text: str, part: str, start: int, limit: int) -> int:
    """End of `part`, which must follow `start`."""
    found = text.find(part, start, limit)
    if found < 0:
        raise RowRefusedError(
            DropReason.MASK_NOT_PROVABLE,
            f"the template leaves out or rewrites {part[:40]!r} of the answer",
        )
    return found + len(part)


def _check_place(behind: str, content: str, span: Span) -> None:
    """What was found is the answer, and no word of a header that the target wrote before it."""
    # A span that may hold other turns has the answer's words in them, too: there only at once.
    is_again = behind.lstrip().startswith(content) if span.ends == "stop" else content in behind
    if content and is_again:
        raise RowRefusedError(
            DropReason.MASK_NOT_PROVABLE,
            f"the answer {content[:40]!r} is in the turn both before and behind a special token",
        )


def _check_turn(
    text: str,
    span: Span,
    message: Message,
    stops: Sequence[Stop],
    said: int,
    stop: Stop | None,
) -> None:
    """The answer is closed at once, and nothing before it: the span may hold other turns."""
    end = stop.start if stop else span.limit
    rest = text[said:end].strip()
    if rest and (stop is None or (message.content and not message.tool_calls)):
        raise RowRefusedError(
            DropReason.MASK_NOT_PROVABLE,
            f"the answer is followed by {rest[:40]!r}, not by an end-of-turn token",
        )
    inside = {other.token_id for other in stops if span.start <= other.start < end}
    if stop and stop.token_id in inside:
        raise RowRefusedError(
            DropReason.MASK_NOT_PROVABLE, "a turn ends before the answer that is looked for"
        )


def _find_stop(
    span: Span, stops: Sequence[Stop], said: int, eos_id: int | None, *, has_calls: bool
) -> Stop | None:
    """The token that ends the turn: the first special token behind the answer.

    Behind tool calls, which may hold special tokens, it is the first eos, or else the last token
    of a span with a known end. There, too, special tokens in a row end a turn together.
    """
    behind = [stop for stop in stops if stop.start >= said and stop.end <= span.limit]
    eos = [stop for stop in behind if stop.token_id == eos_id]
    if has_calls and (eos or span.ends == "stop"):
        return eos[0] if eos else None
    if not behind or has_calls:
        return behind[-1] if behind else None
    found = behind[0]
    for stop in behind[1:]:
        if span.ends == "stop" or found.token_id == eos_id or stop.start != found.end:
            break
        found = stop
    return found


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
