"""Token ids and loss mask of one conversation, by the target's own chat template.

Ids always come from the whole conversation as the template renders it, tokenized without special
tokens of the tokenizer's own. The mask marks what the target generated: think block, answer,
end-of-turn token. A token across the edge of an answer is not supervised.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cache_builder.answer import locate_answer
from cache_builder.control import ControlTokens
from cache_builder.conversation import Conversation, Drop, DropReason, Message, RowRefusedError
from cache_builder.encoding import Encoder
from cache_builder.rendering import RENDER_ERRORS, Renderer
from cache_builder.spans import OPEN_THINK, Span, marked_spans, occurrence_spans, prefix_spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAIL_TOKENS = 32
"""Enough for a think tag and the line breaks behind it, a byte each."""


@dataclass(frozen=True, eq=False, slots=True)
class MaskedTokens:
    token_ids: npt.NDArray[np.int32]
    """int32 [S]."""

    loss_mask: npt.NDArray[np.uint8]
    """uint8 [S]: 1 where the target generated the token."""

    num_straddling: int = 0
    """Tokens across the edge of an answer."""

    num_unthinking: int = 0
    """Answers recorded without a think block where the template writes an empty one."""

    num_unsupervised_turns: int = 0
    """Earlier answers whose recorded reasoning the template leaves out."""

    def cut(self, length: int) -> "MaskedTokens":
        """The first `length` tokens; what was counted stays that of the whole."""
        return replace(self, token_ids=self.token_ids[:length], loss_mask=self.loss_mask[:length])


class ChatTemplate:
    """The chat template and tokenizer of one target, with fixed template arguments."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        arguments: Mapping[str, bool | int | str],
        *,
        end_ids: Sequence[int] = (),
    ) -> None:
        """Check that the template can be used.

        Args:
            end_ids: tokens that end the target's text, besides the tokenizer's own eos.

        Raises:
            TargetError: the template does not compile, or the tokenizer gives no offsets.
            ValueError: an argument would replace what is passed anyway.
        """
        self._renderer = Renderer(tokenizer, arguments)
        self._encoder = Encoder(tokenizer)
        self._tokenizer = tokenizer
        self.arguments = self._renderer.arguments
        self.text = self._renderer.template
        """The template. Empty for a target without one, which can only read text and tokens."""

        self._control = ControlTokens(tokenizer, self._probes(), end_ids)

    @property
    def vocabulary_files(self) -> tuple[str, ...]:
        """Names of the files that tokenizers of this class are made from."""
        return tuple(type(self._tokenizer).vocab_files_names.values())

    @property
    def sha256(self) -> str:
        """Digest of the template's text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def bos_id(self) -> int | None:
        bos_id: int | None = self._tokenizer.bos_token_id
        return bos_id

    @property
    def special_ids(self) -> frozenset[int]:
        return self._encoder.special_ids

    @property
    def reads_clock(self) -> bool:
        """The rendering can hold today's date, and then ids change from day to day."""
        return "strftime_now" in self.text

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> npt.NDArray[np.int32]:
        """Ids of the prompt from which the target generates the next answer, int32 [S].

        Raises:
            RowRefusedError: the template does not take these messages.
        """
        try:
            text = self._renderer.render(messages, tools, generation_prompt=True)
        except RENDER_ERRORS as error:
            raise RowRefusedError(DropReason.TEMPLATE_REFUSED, _one_line(error)) from error
        return self._encoder.encode(text).ids.astype(np.int32)

    def opened_thought(self, prompt_ids: Sequence[int]) -> str:
        """The opening think tag that a prompt ends in. Empty: it ends in none."""
        found = OPEN_THINK.search(self.decode(prompt_ids[-_TAIL_TOKENS:]))
        return found.group() if found else ""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens and spaces as they are."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def require_no_control_token(self, conversation: Conversation) -> None:
        """Refuse messages that write what structures a conversation.

        Raises:
            RowRefusedError: naming message and token.
        """
        if found := self._control.find(conversation):
            raise RowRefusedError(DropReason.CONTROL_TOKEN, found)

    def require_arguments(self, recorded: Mapping[str, Any]) -> None:
        """Refuse answers that were generated with other template arguments.

        Raises:
            RowRefusedError: naming the first.
        """
        if clash := sorted(self._renderer.reserved & recorded.keys()):
            raise RowRefusedError(
                DropReason.BAD_FIELD, f"chat_template_kwargs must not set {', '.join(clash)}"
            )
        for key, value in recorded.items():
            if (ours := self.arguments.get(key)) != value:
                raise RowRefusedError(
                    DropReason.MODE_MISMATCH,
                    f"answered with {key} = {value!r}, but the template arguments say {ours!r}",
                )

    def tokenize(self, conversation: Conversation) -> MaskedTokens | Drop:
        """Ids and mask of a conversation, or why its mask cannot be proven."""
        try:
            self.require_arguments(conversation.template_arguments)
            self.require_no_control_token(conversation)
        except RowRefusedError as error:
            return error.drop
        result = self._try(conversation, verbatim=False)
        if any(message.verbatim is not None for message in conversation.messages):
            # Some templates know thoughts as a field, others print the tags of the content.
            if isinstance(result, MaskedTokens) and not result.num_unsupervised_turns:
                return result
            printed = self._try(conversation, verbatim=True)
            if isinstance(result, Drop) or (
                isinstance(printed, MaskedTokens) and not printed.num_unsupervised_turns
            ):
                return printed
        return result

    def tokenize_text(self, text: str) -> MaskedTokens | Drop:
        """Ids of plain text with all but the first token supervised.

        It starts with a begin token where the tokenizer puts one before text.
        """
        try:
            ids = self._encoder.encode_document(text)
        except RowRefusedError as error:
            return error.drop
        mask = np.ones(len(ids), np.uint8)
        mask[:1] = 0
        return MaskedTokens(ids.astype(np.int32), mask)

    def _probes(self) -> Iterator[str]:
        """Renderings in which every control token is the template's own."""
        system, user = Message(role="system", content="?"), Message(role="user", content="?")
        answer = Message(role="assistant", content="!")
        for messages in ([user, answer, user], [user, answer], [system, user]):
            with contextlib.suppress(*RENDER_ERRORS):
                yield self._renderer.render(messages, (), generation_prompt=messages[-1] is user)

    def _try(self, conversation: Conversation, *, verbatim: bool) -> MaskedTokens | Drop:
        try:
            return self._tokenize(conversation, verbatim=verbatim)
        except RowRefusedError as error:
            return error.drop

    def _tokenize(self, conversation: Conversation, *, verbatim: bool) -> MaskedTokens:
        messages = conversation.messages
        turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
        try:
            text = self._renderer.render(messages, conversation.tools, verbatim=verbatim)
        except RENDER_ERRORS as error:
            raise RowRefusedError(DropReason.TEMPLATE_REFUSED, _one_line(error)) from error
        spans = self._spans(text, conversation, turns, verbatim=verbatim)
        encoding = self._encoder.encode(text)
        mask = np.zeros(len(encoding.ids), np.uint8)
        cut = len(text)
        num_straddling = num_unthinking = num_unsupervised = 0
        for turn, span in zip(turns, spans, strict=True):
            is_last = turn == turns[-1]
            is_cut = is_last and conversation.is_cut_off
            answer = locate_answer(
                text,
                span,
                messages[turn],
                encoding.stops,
                eos_id=self._tokenizer.eos_token_id,
                is_last=is_last,
                is_cut=is_cut,
                is_thought_left_out=self._leaves_out_thought(text, conversation, turn, verbatim),
            )
            if answer is None:
                num_unsupervised += 1
                continue
            inside, straddling = encoding.mark(answer.start, answer.end)
            mask[inside] = 1
            num_straddling += straddling
            num_unthinking += answer.is_unthinking
            cut = answer.end if is_cut else cut
        kept = int(np.searchsorted(encoding.ends, cut, side="right"))
        return MaskedTokens(
            encoding.ids[:kept].astype(np.int32),
            mask[:kept],
            num_straddling=num_straddling,
            num_unthinking=num_unthinking,
            num_unsupervised_turns=num_unsupervised,
        )

    def _leaves_out_thought(
        self, text: str, conversation: Conversation, turn: int, verbatim: bool
    ) -> bool:
        """The conversation without the reasoning of this turn has the same rendering, `text`."""
        messages = list(conversation.messages)
        if not messages[turn].reasoning:
            return False
        messages[turn] = replace(messages[turn], reasoning=None, verbatim=None)
        try:
            return text == self._renderer.render(messages, conversation.tools, verbatim=verbatim)
        except RENDER_ERRORS:
            return False

    def _spans(
        self, text: str, conversation: Conversation, turns: Sequence[int], *, verbatim: bool
    ) -> list[Span]:
        messages = conversation.messages

        def render(num_messages: int, generation_prompt: bool) -> str | None:
            if (num_messages, generation_prompt) == (len(messages), False):
                return text
            try:
                return self._renderer.render(
                    messages[:num_messages],
                    conversation.tools,
                    generation_prompt=generation_prompt,
                    verbatim=verbatim,
                )
            except RENDER_ERRORS:
                return None

        marked = self._renderer.render_marked(messages, conversation.tools, verbatim=verbatim)
        if marked is not None:
            rendered, marks = marked
            if rendered != text:
                raise RowRefusedError(
                    DropReason.MASK_NOT_PROVABLE, "the template renders differently each time"
                )
            return marked_spans(text, marks, turns, render)
        spans = prefix_spans(text, turns, render)
        return occurrence_spans(text, messages, turns, render) if spans is None else spans


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
