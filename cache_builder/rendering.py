"""The text of a conversation, as the target's own chat template writes it."""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from cache_builder.conversation import Message
from shared.errors import TargetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")

RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    RecursionError,
)
"""What a template raises, itself or through its values, on a conversation it does not take."""


class Renderer:
    """The chat template of one tokenizer, with fixed template arguments.

    Attributes:
        template: its text; of several, all of them. Empty where there is none.
        arguments: the template arguments.
        reserved: names that they cannot have.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", arguments: Mapping[str, bool | int | str]
    ) -> None:
        """Check that the template can be used.

        Raises:
            TargetError: it does not compile.
            ValueError: an argument would replace what is passed anyway.
        """
        self.reserved = _reserved(tokenizer)
        if clash := sorted(self.reserved & arguments.keys()):
            raise ValueError(
                f"must not set {', '.join(clash)}: it is passed to the template anyway"
            )
        self._tokenizer = tokenizer
        self.arguments = dict(arguments)
        given = tokenizer.chat_template or ""
        self.template = given if isinstance(given, str) else json.dumps(given, sort_keys=True)
        try:
            self.render([Message(role="user", content="?")], (), generation_prompt=True)
        except jinja2.TemplateSyntaxError as error:
            raise TargetError(
                f"{tokenizer.name_or_path}: the chat template does not compile ({error})."
            ) from error
        except RENDER_ERRORS:
            pass  # It does not take this conversation; it may take those of the dataset.

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool = False,
        verbatim: bool = True,
    ) -> str:
        """The text. Raises one of `RENDER_ERRORS` where the template does not take `messages`."""
        text: str = self._tokenizer.apply_chat_template(
            message_fields(messages, verbatim=verbatim),
            tools=list(tools) or None,
            add_generation_prompt=generation_prompt,
            tokenize=False,
            **self.arguments,
        )
        return text

    def render_marked(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, verbatim: bool
    ) -> tuple[str, list[tuple[int, int]]] | None:
        """The text and the characters that the template itself marks as generated, if it does."""
        given = list(tools) or None
        template = self._tokenizer.get_chat_template(tools=given)
        if not _GENERATION_MARKER.search(template):
            return None
        texts, marks = render_jinja_template(
            [message_fields(messages, verbatim=verbatim)],
            tools=given,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **self.arguments},
        )
        return texts[0], marks[0]


def _reserved(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """Names that template arguments cannot have: transformers passes them itself."""
    functions = (tokenizer.apply_chat_template, render_jinja_template)
    return {"self", "messages"}.union(*(inspect.signature(f).parameters for f in functions))


def message_fields(messages: Sequence[Message], *, verbatim: bool) -> list[dict[str, Any]]:
    """Messages as a chat template reads them.

    With `verbatim`, an answer recorded with think tags keeps them in its content, for templates
    that print or parse them; else the reasoning is a field.
    """
    result = []
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if verbatim and message.verbatim is not None:
            fields["content"] = message.verbatim
        elif message.reasoning is not None:
            fields["reasoning_content"] = message.reasoning
        if message.tool_calls:
            fields["tool_calls"] = list(message.tool_calls)
        result.append({**fields, **message.fields})
    return result
