"""A server on this machine that speaks OpenAI's protocol, over any generator."""

import json
import threading
from collections.abc import Callable, Sequence
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from cache_builder.batches import Generator
from cache_builder.generation import Answer, Sampling
from cache_builder.message import parse_message
from cache_builder.template import ChatTemplate

MODEL = "tiny"


class Hashing:
    """Answers with letters that only the prompt decides, and an end token."""

    eos_ids = frozenset({2})

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Answer]:
        answers = []
        for prompt in prompts:
            digest = sha256(bytes(str(list(prompt)), "ascii")).digest()
            ids = [70 + value % 26 for value in digest[: 3 + digest[0] % 6]]
            answers.append(Answer((*ids, 2), "stop"))
        return answers


class _Quiet(ThreadingHTTPServer):
    """Clients that went away are no news."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class Server:
    """A context manager. Its switches may be thrown while it runs."""

    def __init__(self, generator: Generator, template: ChatTemplate) -> None:
        self.generator = generator
        self.template = template
        self.dialect = "vllm"
        """`vllm`, `sglang`, or `bare`: without ids."""

        self.reasoning: dict[str, str] = {}
        """Put into each message of a chat completion."""

        self.system: str | None = None
        """Put before each chat by the server's template."""

        self.has_models = True
        self.key: str | None = None
        self.on_request: Callable[[int, dict[str, Any]], tuple[int, str] | None] = (
            lambda number, request: None
        )
        """Given number, from 0, and body of a request: status and message instead of an answer."""

        self.change: Callable[[dict[str, Any]], None] = lambda choice: None
        """Changes a choice before it is sent."""

        self.requests: list[dict[str, Any]] = []
        self.released = threading.Event()
        """Ends whatever hangs."""

        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> "Server":
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:  # the name that http.server calls
                outer.get(self)

            def do_POST(self) -> None:
                outer.post(self)

            def log_message(self, *args: object) -> None:
                pass

        self._server = _Quiet(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def get(self, http: BaseHTTPRequestHandler) -> None:
        if self._is_refused(http):
            return
        if not self.has_models or http.path != "/v1/models":
            self._fail(http, 404, "Not Found")
        else:
            self._send(http, 200, {"data": [{"id": MODEL, "owned_by": self.dialect}]})

    def post(self, http: BaseHTTPRequestHandler) -> None:
        request = json.loads(http.rfile.read(int(http.headers["content-length"])))
        if self._is_refused(http):
            return
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
        if verdict := self.on_request(number, request):
            self._fail(http, *verdict)
        elif request["model"] != MODEL:
            self._fail(http, 404, f"The model `{request['model']}` does not exist.")
        else:
            self._answer(http, request)

    def _answer(self, http: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
        is_chat = http.path == "/v1/chat/completions"
        prompt = self._render(request) if is_chat else request["prompt"]
        sampling = Sampling(max_new_tokens=request["max_tokens"])
        with self._lock:
            (answer,) = self.generator.generate([prompt], sampling)
        said = list(answer.token_ids or ())
        text = self.template.decode(said[:-1] if answer.finish_reason == "stop" else said)
        choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish_reason}
        if is_chat:
            choice["message"] = {"role": "assistant", "content": text, **self.reasoning}
        else:
            choice["text"] = text
        body: dict[str, Any] = {"model": MODEL, "choices": [choice]}
        body["usage"] = {"prompt_tokens": len(prompt), "completion_tokens": len(said)}
        if request.get("return_token_ids") and self.dialect != "bare":
            choice["token_ids"] = said
            of_prompt = body if is_chat and self.dialect == "vllm" else choice
            of_prompt["prompt_token_ids"] = prompt
        self.change(choice)
        self._send(http, 200, body)

    def _render(self, request: dict[str, Any]) -> list[int]:
        messages = request["messages"]
        if self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        ids: list[int] = self.template.prompt_ids(
            [parse_message(message) for message in messages]
        ).tolist()
        return ids

    def _is_refused(self, http: BaseHTTPRequestHandler) -> bool:
        given = http.headers.get("authorization")
        if self.key is None or given == f"Bearer {self.key}":
            return False
        self._fail(http, 401, f"Unauthorized: {given}")
        return True

    def _fail(self, http: BaseHTTPRequestHandler, status: int, message: str) -> None:
        self._send(http, status, {"error": {"message": message, "code": status}})

    def _send(self, http: BaseHTTPRequestHandler, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        http.send_response(status)
        http.send_header("content-length", str(len(data)))
        http.end_headers()
        http.wfile.write(data)
