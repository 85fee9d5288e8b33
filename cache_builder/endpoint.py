"""A connection to a server that runs the target."""

import re
from typing import TYPE_CHECKING, Any

from cache_builder.exchange import Turn
from cache_builder.generation import Answer, Sampling
from cache_builder.protocol import EndpointConfig, RefusedError, read_answer, request_body
from shared.errors import EndpointError

if TYPE_CHECKING:
    import httpx

_OF_ONE_ROW = frozenset({400, 413, 422})
"""Statuses that say something about one request."""

_PASSING = frozenset({408, 409, 425, 429})
"""Statuses that another try may change, besides 5xx."""

_CONNECT_SECONDS = 10.0


class PassingError(Exception):
    """Another try may succeed. Never reaches a user."""

    def __init__(self, kind: str, detail: str, retry_after: float = 0.0) -> None:
        super().__init__(detail)
        self.kind = kind
        """Status, or what happened on the way."""

        self.retry_after = retry_after
        """Seconds that the server asks for."""


class Endpoint:
    """A connection to the server. Its methods may be called from several threads."""

    def __init__(
        self, config: EndpointConfig, *, eos_ids: frozenset[int], api_key: str | None = None
    ) -> None:
        """Prepare to connect.

        Args:
            eos_ids: tokens that end an answer.
            api_key: sent to the server without white space around it, and written nowhere.

        Raises:
            EndpointError: httpx is not installed, no header can hold the key, or a variable of the
                environment names a proxy that is none.
        """
        try:
            import httpx
        except ImportError:
            raise EndpointError(
                "httpx is not installed. Install it: pip install 'draftcache[endpoint]'."
            ) from None
        self.config = config
        self.eos_ids = eos_ids
        self._url = config.url.rstrip("/")
        self._api_key = _checked_key(api_key)
        self._timeout_error, self._request_error = httpx.TimeoutException, httpx.RequestError
        try:
            self._client = httpx.Client(
                headers={"Authorization": f"Bearer {self._api_key}"} if self._api_key else {},
                timeout=httpx.Timeout(
                    config.timeout_seconds,
                    connect=min(_CONNECT_SECONDS, config.timeout_seconds),
                    pool=None,
                ),
                limits=httpx.Limits(
                    max_connections=config.concurrency, max_keepalive_connections=config.concurrency
                ),
            )
        except (ValueError, ImportError, httpx.InvalidURL) as error:
            raise EndpointError(
                f"{config.url}: HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names no proxy that httpx can "
                f"use ({type(error).__name__}; a SOCKS proxy needs the package socksio). Correct "
                "it, unset it, or name the server's host in NO_PROXY."
            ) from None  # the address may hold a password

    def close(self) -> None:
        self._client.close()

    def describe(self) -> str:
        """The model and what serves it, such as `qwen@vllm/completions`.

        Raises:
            PassingError: the server cannot be reached, or is busy.
            EndpointError: it does not serve the model.
        """
        kind, way = "server", "chat" if self.config.is_chat else "completions"
        try:
            cards = self._send("GET", "/models").get("data")
        except (_MissingError, RefusedError):
            return f"{self.config.model}@{kind}/{way}"  # a server without this list
        cards = (
            [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
        )
        owners = {card.get("id"): card.get("owned_by") for card in cards}
        if self.config.model not in owners:
            names = ", ".join(repr(name) for name in list(owners)[:8]) or "none"
            raise EndpointError(
                f"{self._url}: does not serve {self.config.model!r}, but {names}. Set --model."
            )
        owner = owners[self.config.model]
        if isinstance(owner, str) and re.fullmatch(r"[\w.-]{1,32}", owner):
            kind = owner
        return f"{self.config.model}@{kind}/{way}"

    def ask(self, turn: Turn, sampling: Sampling) -> Answer:
        """One answer.

        Raises:
            PassingError: not now.
            RefusedError: not for this turn.
            EndpointError: for none: another key, model or address is needed.
        """
        path = "/chat/completions" if self.config.is_chat else "/completions"
        try:
            body = self._send("POST", path, request_body(self.config, self.eos_ids, turn, sampling))
        except _MissingError as error:
            raise EndpointError(
                f"{self._url}{path}: status 404 ({error}). Check --model, and that --endpoint ends "
                "where the server's paths begin, mostly in /v1."
            ) from None
        return read_answer(self.config, body, turn)

    def _send(self, method: str, path: str, request: Any = None) -> dict[str, Any]:
        try:
            response = self._client.request(method, self._url + path, json=request)
        except self._timeout_error as error:
            raise PassingError("timeout", self._worded(error)) from None
        except self._request_error as error:
            raise PassingError("connection", self._worded(error)) from None
        except ValueError as error:
            raise RefusedError(f"cannot be sent ({self._worded(error)})") from None
        status = response.status_code
        if status == 200:
            try:
                body = response.json()
            except (ValueError, RecursionError):
                body = None
            if isinstance(body, dict):
                return body
            raise RefusedError(f"status 200, but no JSON object: {self._excerpt(response)!r}")
        detail = self._excerpt(response)
        if status in _PASSING or status >= 500:
            after = response.headers.get("retry-after", "")
            raise PassingError(str(status), detail, float(after) if after.isdecimal() else 0.0)
        if status in _OF_ONE_ROW:
            raise RefusedError(f"status {status}: {detail}")
        if status == 404:
            raise _MissingError(detail)
        hint = "Check --endpoint."
        if status in (401, 403):
            has = "is not accepted" if self._api_key else "is not set"
            hint = f"OPENAI_API_KEY {has}: export the key of this server."
        raise EndpointError(f"{self._url}{path}: status {status} ({detail}). {hint}")

    def _excerpt(self, response: "httpx.Response") -> str:
        try:
            body = response.json()
            error = body.get("error", body)
            text = error.get("message", error) if isinstance(error, dict) else error
        except (ValueError, AttributeError, RecursionError):
            text = response.text
        return self._without_key(" ".join(str(text).split()))[:200]

    def _worded(self, error: Exception) -> str:
        """One line. Errors of httpx may quote what was sent, or what a broken server sent back."""
        return self._without_key(f"{type(error).__name__}: {error}")

    def _without_key(self, text: str) -> str:
        return text.replace(self._api_key, "***") if self._api_key else text


def _checked_key(api_key: str | None) -> str:
    key = (api_key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise EndpointError(
            "OPENAI_API_KEY holds a character that is not printable ASCII, which no header can "
            "hold. Export the key alone, on one line."
        )
    return key


class _MissingError(Exception):
    """Status 404."""
