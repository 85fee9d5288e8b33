"""What goes to a server of OpenAI's protocol, and what comes back (vLLM, SGLang).

The prompt goes out as ids that our template gave, so that what the server saw is what is recorded.
vLLM (pull request 22587) and SGLang (30917, July 2026) answer `return_token_ids` with `token_ids`
of each choice; in chat completions the ids of the prompt lie beside the choices (vLLM) or in them
(SGLang).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from cache_builder.conversation import THINK_CLOSE, Message, RowRefusedError
from cache_builder.exchange import Turn
from cache_builder.generation import Answer, Sampling
from cache_builder.message import parse_message
from cache_builder.rendering import message_fields
from shared.errors import EndpointError
from shared.files import canonical_json, sha256_bytes

OWN_DEFAULTS: Mapping[str, Any] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sent so that the server does not put defaults of the model in their place."""


class RefusedError(Exception):
    """The server does not answer this one request. Never reaches a user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointConfig:
    url: str
    """Up to and with `/v1`."""

    model: str
    concurrency: int
    """Requests at once."""

    is_chat: bool
    """Send messages, which the server's own template renders, instead of ids."""

    is_plain: bool
    """Send only what OpenAI's own protocol knows: no ids come back."""

    timeout_seconds: float
    """For one answer."""

    num_retries: int
    """Of one request."""

    backoff_seconds: float = 1.0
    """Before the first retry. It doubles from one to the next."""

    def __post_init__(self) -> None:
        if not _is_url(self.url):
            raise ValueError(f"expected a URL such as http://host:8000/v1, got {self.url!r}")
        parts = urlsplit(self.url)
        if parts.username or parts.password:
            raise ValueError("the URL must hold no password; set OPENAI_API_KEY instead")
        if self.timeout_seconds <= 0.0:
            raise ValueError(f"the timeout must be positive, got {self.timeout_seconds}")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    try:
        import httpx
    except ImportError:
        return is_url  # an `Endpoint` says that it is missing
    try:
        httpx.URL(text)  # stricter about the host and its characters
    except httpx.InvalidURL:
        return False
    return is_url


def request_body(
    config: EndpointConfig, eos_ids: frozenset[int], turn: Turn, sampling: Sampling
) -> dict[str, Any]:
    """What one answer is asked by."""
    request: dict[str, Any] = {
        "model": config.model,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    if sampling.temperature:
        # By the prompt: a run that was stopped and resumed asks for the same draws.
        drawn = sha256_bytes(canonical_json([sampling.seed, list(turn.prompt_ids)]))
        request["seed"] = int(drawn[:7], 16)
    if config.is_chat:
        request["messages"] = message_fields(turn.messages, verbatim=True)
        if turn.tools:
            request["tools"] = list(turn.tools)
        if turn.template_arguments:
            request["chat_template_kwargs"] = dict(turn.template_arguments)
    else:
        request["prompt"] = list(turn.prompt_ids)
    if not config.is_plain:
        request |= OWN_DEFAULTS
        request |= {"stop_token_ids": sorted(eos_ids), "return_token_ids": True}
        request["skip_special_tokens"] = False  # where only text comes back
    return request


def read_answer(config: EndpointConfig, body: dict[str, Any], turn: Turn) -> Answer:
    """The answer to `turn` in what the server sent.

    Raises:
        RefusedError: there is none.
        EndpointError: the server saw another prompt than it was sent.
    """
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or not isinstance(choice.get("finish_reason"), str):
        raise RefusedError(f"no choice with a finish_reason among the keys {sorted(body)}")
    token_ids = _ids(choice.get("token_ids"))
    prompt_ids = _ids(choice.get("prompt_token_ids") or body.get("prompt_token_ids"))
    said: Message | None
    if config.is_chat:
        said = message = _message(choice.get("message"))
        token_ids = None if prompt_ids is None else token_ids  # ids of ours would be a guess
        if token_ids is None and turn.opened_thought and choice["finish_reason"] != "stop":
            _require_known_thought(message)
    else:
        text = choice.get("text")
        if not isinstance(text, str):
            raise RefusedError("the choice has no text")
        # Without the tag that the prompt has begun with, a cut thought would look like an answer.
        whole = turn.opened_thought + text
        said = Message(role="assistant", content=whole) if token_ids is None else None
        if prompt_ids not in (None, tuple(turn.prompt_ids)):
            raise EndpointError(
                f"{config.url}: the server answered another prompt than it was sent "
                f"({len(turn.prompt_ids)} ids sent, {len(prompt_ids or ())} seen). Make it "
                "take ids as they are: no truncation, no tokens added."
            )
    usage = body.get("usage")
    counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return Answer(
        token_ids,
        choice["finish_reason"],
        said=said,
        prompt_ids=prompt_ids,
        num_text_tokens=counted if isinstance(counted, int) else 0,
    )


def _ids(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    if not all(type(token) is int and token >= 0 for token in value):
        raise RefusedError("token ids must be integers")
    return tuple(value)


def _message(value: Any) -> Message:
    """The message of a chat completion. One with odd think tags stays as it is worded."""
    if not isinstance(value, dict):
        raise RefusedError("the choice has no message")
    try:
        message = parse_message({**value, "role": "assistant"})
    except RowRefusedError as error:
        if not isinstance(value.get("content"), str):
            raise RefusedError(f"the message cannot be used ({error})") from None
        message = Message(role="assistant", content=value["content"])
    return message


def _require_known_thought(message: Message) -> None:
    """Refuse a cut-off answer that may be a thought: some servers give such a one as content."""
    is_known = message.reasoning is not None or THINK_CLOSE in message.content
    if not (is_known or message.tool_calls):
        raise RefusedError(
            "the answer was cut off, perhaps within its thought, which the server does not tell "
            "apart. Raise --max-new-tokens, or ask without --chat"
        )
