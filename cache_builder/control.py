"""Tokens that structure a conversation, which no message may write itself.

Within a message such a token becomes the special id: an answer would be supervised as though the
target had ended its turn there, and a user's text would open turns that the row does not have.
Tokens that a target may write inside an answer (think tags, tool calls, boxes) are not among them.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cache_builder.conversation import THINK_CLOSE, THINK_OPEN, Conversation, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ControlTokens:
    """The named tokens of a tokenizer (begin, end, padding) and the turn tokens of a template."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        renderings: Iterable[str],
        end_ids: Sequence[int],
    ) -> None:
        """Find them.

        Args:
            renderings: of the template, around contents without any added token.
            end_ids: tokens that end text, besides the tokenizer's own.
        """
        added = tokenizer.added_tokens_decoder
        named = tokenizer.special_tokens_map.values()
        texts = {token for token in named if isinstance(token, str)}
        texts |= {added[i].content for i in end_ids if i in added}
        rendered = "\n".join(renderings)
        texts |= {
            token.content
            for token in added.values()
            if token.content in rendered and (token.special or _is_marker(token.content))
        }
        self.texts = tuple(sorted(texts - {"", THINK_OPEN, THINK_CLOSE}, key=len, reverse=True))
        """Longest first."""

        self._pattern = re.compile("|".join(map(re.escape, self.texts))) if self.texts else None

    def find(self, conversation: Conversation) -> str | None:
        """Where the conversation writes one itself, as a sentence. None: nowhere."""
        if self._pattern is None:
            return None
        for number, message in enumerate(conversation.messages):
            for text in _texts(message):
                if match := self._pattern.search(text):
                    return (
                        f"message {number} ({message.role}) writes {match.group()!r} as text, "
                        "which becomes the control token"
                    )
        if conversation.tools and (match := self._pattern.search(_json(conversation.tools))):
            return f"the tools write {match.group()!r} as text, which becomes the control token"
        return None


def _texts(message: Message) -> Iterator[str]:
    yield message.verbatim or message.content
    yield message.reasoning or ""
    yield from message.fields.values()
    if message.tool_calls:
        yield _json(message.tool_calls)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_marker(text: str) -> bool:
    """A token such as `<|user|>`. Added tokens of white space or of words are ordinary text."""
    return len(text) > 2 and not (
        text[0].isalnum() or text[-1].isalnum() or not text.strip("\n\t ▁")
    )
