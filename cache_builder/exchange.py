"""One conversation while its answers are generated, turn by turn."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cache_builder.conversation import Conversation, Message, RowRefusedError
from cache_builder.generation import Answer
from cache_builder.template import ChatTemplate

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """One row of the data, its answers left out."""

    key: bytes
    """Of what is asked: equal conversations have equal keys."""

    place: str
    """`file:line`."""

    carried: dict[str, Any]
    """Fields of the row that are written as they are, JSON values."""

    conversation: Conversation
    first_ids: tuple[int, ...]
    """Ids up to the first answer."""


@dataclass(frozen=True, eq=False, slots=True)
class Turn:
    """What one answer is asked for."""

    prompt_ids: Sequence[int]
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    template_arguments: Mapping[str, Any]
    opened_thought: str
    """The opening think tag that the prompt ends in. Empty: it ends in none."""


class Exchange:
    """What is asked of the target next, and what it answered so far.

    Each assistant turn is generated in its place, on top of the ones generated before.
    """

    def __init__(
        self,
        prompt: Prompt,
        template: ChatTemplate,
        *,
        eos_ids: frozenset[int],
        max_prompt_tokens: int,
    ) -> None:
        """Open the first turn.

        Args:
            eos_ids: tokens that end an answer; they are no part of its text.
            max_prompt_tokens: a later turn whose prompt is longer is left out.
        """
        self.prompt = prompt
        self._template = template
        self._eos_ids = eos_ids
        self._max_prompt_tokens = max_prompt_tokens
        self.messages: list[Message] = []
        """Up to the next answer; at the end, with the last one."""

        self.prompt_ids: list[int] = list(prompt.first_ids)
        """Ids that the next answer follows."""

        self.token_ids: list[int] | None = []
        """What the target saw and produced. None: a server gave an answer without ids."""

        self.loss_mask: list[int] = []
        self.answers: list[Answer] = []
        self.num_prompt_tokens = 0
        """Of every answer."""

        self.num_unsupervised_turns = 0
        """Earlier answers that the prompt of a later turn does not hold as they were generated."""

        self.num_turns_left_out = 0
        """Turns behind an answer that did not end, or whose prompt would be too long."""

        self.num_other_prompts = 0
        """Answers to a prompt that the server rendered differently than our template."""

        self.num_without_end = 0
        """Ended answers whose ids lack the end token."""

        self.retries: Counter[str] = Counter()
        self.failure: str | None = None
        """Why the conversation could not be answered. None: it could, so far."""

        self.is_open = True
        """An answer is to be generated."""

        self._take_up(prompt.conversation.messages)

    @property
    def turn(self) -> Turn:
        """What is asked next."""
        return Turn(
            self.prompt_ids,
            tuple(self.messages),
            self.prompt.conversation.tools,
            self._template.arguments,
            self._template.opened_thought(self.prompt_ids),
        )

    def add(self, answer: Answer) -> None:
        """Take the answer of the turn that is open, and open the next one if there is one."""
        self.answers.append(answer)
        self.num_prompt_tokens += len(answer.prompt_ids or self.prompt_ids)
        self._extend(answer)
        self.messages.append(self._said(answer))
        ahead = self.prompt.conversation.messages[len(self.messages) :]
        self.is_open = bool(ahead) and answer.finish_reason == "stop" and self._ask_next(ahead)
        if not self.is_open:
            self.num_turns_left_out = sum(message.role == "assistant" for message in ahead)

    def fail(self, reason: str) -> None:
        """Close the conversation for good, without its answers."""
        self.failure = reason
        self.is_open = False

    def _ask_next(self, ahead: Sequence[Message]) -> bool:
        num_messages = len(self.messages)
        self._take_up(ahead)
        try:
            ids = self._template.prompt_ids(self.messages, self.prompt.conversation.tools).tolist()
        except RowRefusedError as error:
            logger.warning("%s: no further turns (%s)", self.prompt.place, error)
            ids = None
        if ids is None or len(ids) > self._max_prompt_tokens:
            del self.messages[num_messages:]
            return False
        self.prompt_ids = ids
        return True

    def _take_up(self, ahead: Sequence[Message]) -> None:
        first = next(i for i, message in enumerate(ahead) if message.role == "assistant")
        self.messages += ahead[:first]

    def _extend(self, answer: Answer) -> None:
        if self.token_ids is None or answer.token_ids is None:
            self.token_ids = None
            return
        prompt = self.prompt_ids if answer.prompt_ids is None else list(answer.prompt_ids)
        self.num_other_prompts += prompt != self.prompt_ids
        is_continued = prompt[: len(self.token_ids)] == self.token_ids
        mask = self.loss_mask if is_continued else []
        self.num_unsupervised_turns += not is_continued
        self.token_ids = prompt + list(answer.token_ids)
        self.loss_mask = mask + [0] * (len(prompt) - len(mask)) + [1] * len(answer.token_ids)

    def _said(self, answer: Answer) -> Message:
        is_ended = answer.finish_reason == "stop"
        if answer.token_ids is not None:
            said = list(answer.token_ids)
            if said and said[-1] in self._eos_ids:
                said.pop()
            else:
                self.num_without_end += is_ended
            text = self._template.opened_thought(self.prompt_ids) + self._template.decode(said)
            return answer.said or Message(role="assistant", content=text)
        assert answer.said is not None, "an answer has ids or text"
        content = answer.said.content
        if is_ended:  # some servers print the end token
            for end in self._eos_ids:
                content = content.removesuffix(self._template.decode([end]))
        return replace(answer.said, content=content)
