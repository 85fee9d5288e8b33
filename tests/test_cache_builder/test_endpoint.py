"""Answers of a server are those of the target, whatever the server does in between."""

import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer

from cache_builder.batches import Batches
from cache_builder.cli import main
from cache_builder.config import DataConfig, TargetConfig
from cache_builder.conversation import Conversation, Message
from cache_builder.dispatch import Dispatcher
from cache_builder.endpoint import Endpoint
from cache_builder.generation import LocalGenerator, Sampling
from cache_builder.protocol import EndpointConfig
from cache_builder.record import parse_record
from cache_builder.regenerate import Answerer, RegenerateReport, regenerate, rows
from cache_builder.target_config import load_config
from cache_builder.template import ChatTemplate, MaskedTokens
from cache_builder.tokens import end_token_ids, load_template
from shared.errors import DataError, EndpointError
from tests.conftest import CHATML, conversations, write_jsonl
from tests.test_cache_builder.server import MODEL, Hashing, Server
from tests.test_cache_builder.test_template import OPENED

Rows = dict[Any, dict[str, Any]]
SAMPLING = Sampling(max_new_tokens=12)


@pytest.fixture(scope="module")
def template(tiny_target: Path) -> ChatTemplate:
    return load_template(tiny_target, DataConfig(sources=("-",), max_length=256))


@pytest.fixture
def server(template: ChatTemplate) -> Iterator[Server]:
    with Server(Hashing(), template) as running:
        yield running


def prompts(path: Path, count: int) -> Path:
    """Conversations of one turn, every third of two."""
    made = [{"id": f"row-{n}", **row} for n, row in enumerate(conversations(range(count)))]
    for row in made[::3]:
        row["messages"] = [*row["messages"], {"role": "user", "content": "and then?"}]
    return write_jsonl(path, made)


def read(out: Path) -> Rows:
    return {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}


def through(
    answerer: Answerer, template: ChatTemplate, data: Path, out: Path, **options: Any
) -> tuple[Rows, RegenerateReport]:
    settings: dict[str, Any] = {"generated_by": "-", "rendered_by": "-", "sampling": SAMPLING}
    settings["max_length"] = 256
    report = regenerate(answerer, template, [str(data)], out, **settings | options)
    return read(out), report


def endpoint_config(url: str, **settings: Any) -> EndpointConfig:
    given: dict[str, Any] = {
        "url": url,
        "model": MODEL,
        "concurrency": 4,
        "is_chat": False,
        "is_plain": False,
        "timeout_seconds": 300.0,
        "num_retries": 2,
        "backoff_seconds": 0.01,
    }
    return EndpointConfig(**given | settings)


def ask(server: Server, data: Path, out: Path, **settings: Any) -> tuple[Rows, RegenerateReport]:
    config = endpoint_config(server.url, **settings)
    with Dispatcher(Endpoint(config, eos_ids=frozenset({2}))) as dispatcher:
        by = dispatcher.describe()
        return through(dispatcher, server.template, data, out, generated_by=by)


def locally(template: ChatTemplate, data: Path, out: Path) -> Rows:
    return through(Batches(Hashing(), 4), template, data, out)[0]


def without(rows: Rows, *keys: str) -> Rows:
    return {
        name: {key: value for key, value in row.items() if key not in keys}
        for name, row in rows.items()
    }


def test_rows_are_those_of_the_local_target_token_for_token(
    template: ChatTemplate, tiny_target: Path, tmp_path: Path
) -> None:
    local = LocalGenerator(tiny_target, TargetConfig(path=str(tiny_target), dtype="float32"))
    assert end_token_ids(tiny_target, load_config(tiny_target)) == local.eos_ids
    data = prompts(tmp_path / "p.jsonl", 7)
    expected, _ = through(Batches(local, 4), template, data, tmp_path / "local.jsonl")
    with Server(local, template) as server:
        found, report = ask(server, data, tmp_path / "o.jsonl")
    assert {row["generated_by"] for row in found.values()} == {"tiny@vllm/completions"}
    assert without(found, "generated_by") == without(expected, "generated_by")
    assert all("input_ids" in row for row in found.values())
    assert (report.num_answered, report.num_text_only, report.num_failed) == (7, 0, 0)
    assert report.num_new_tokens == sum(sum(row["loss_mask"]) for row in found.values())


def test_turns_are_asked_on_top_of_the_answers_with_our_ids(
    server: Server, template: ChatTemplate, tmp_path: Path
) -> None:
    data = prompts(tmp_path / "p.jsonl", 9)
    found, report = ask(server, data, tmp_path / "o.jsonl")
    expected = locally(template, data, tmp_path / "local.jsonl")
    assert without(found, "generated_by") == without(expected, "generated_by")
    assert report.finish_reasons == {"stop": 12}
    two = found["row-3"]
    assert [message["role"] for message in two["messages"]] == ["user", "assistant"] * 2
    first = locally(
        template,
        write_jsonl(tmp_path / "1.jsonl", [{"id": 0, "messages": two["messages"][:1]}]),
        tmp_path / "1-out.jsonl",
    )[0]
    size = len(first["input_ids"])
    assert two["input_ids"][:size] == first["input_ids"]
    assert two["loss_mask"][:size] == first["loss_mask"]
    assert sum(two["loss_mask"][size:]) > 1


def test_what_the_server_must_not_put_in_its_place_is_sent(server: Server, tmp_path: Path) -> None:
    data = prompts(tmp_path / "p.jsonl", 1)
    ask(server, data, tmp_path / "o.jsonl")
    ask(server, data, tmp_path / "plain.jsonl", is_plain=True)
    own = {
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [2],
        "return_token_ids": True,
        "skip_special_tokens": False,
    }
    common = {"model", "prompt", "max_tokens", "temperature", "top_p"}
    first, *_, last = server.requests
    assert {key: first[key] for key in first.keys() - common} == own
    assert last.keys() == common
    assert (last["max_tokens"], last["temperature"], last["top_p"]) == (12, 0.0, 1.0)


@pytest.mark.parametrize("prints_end", [False, True])
def test_without_ids_the_text_is_kept_alone_and_counted(
    server: Server, template: ChatTemplate, tmp_path: Path, prints_end: bool
) -> None:
    server.dialect = "bare"
    if prints_end:
        server.change = lambda choice: choice.update(text=choice["text"] + "<|im_end|>")
    data = prompts(tmp_path / "p.jsonl", 6)
    found, report = ask(server, data, tmp_path / "o.jsonl")
    expected = locally(template, data, tmp_path / "local.jsonl")
    ids = ("generated_by", "input_ids", "loss_mask")
    assert without(found, "generated_by") == without(expected, *ids)
    assert report.num_text_only == 6
    assert ("text only, no ids", "6") in rows(report)
    new_tokens = sum(sum(row["loss_mask"]) for row in expected.values())
    assert report.num_new_tokens == new_tokens


@pytest.fixture(scope="module")
def opened(tiny_target: Path) -> ChatTemplate:
    """Its generation prompt ends in an opening think tag."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    tokenizer.chat_template = OPENED
    return ChatTemplate(tokenizer, {})


@pytest.mark.parametrize(
    ("finish_reason", "said"),
    [
        ("length", "so it must"),
        ("length", "so it must be</think>\n\nfour, but"),
        ("stop", "so it must be\n</think>\n\nfour"),
    ],
)
@pytest.mark.parametrize("dialect", ["bare", "vllm"])
def test_the_text_of_an_answer_begins_with_the_tag_that_its_prompt_opened(
    opened: ChatTemplate,
    tiny_target: Path,
    tmp_path: Path,
    dialect: str,
    finish_reason: str,
    said: str,
) -> None:
    said_ids = AutoTokenizer.from_pretrained(tiny_target)(said).input_ids
    said_ids += [2] * (finish_reason == "stop")

    def change(choice: dict[str, Any]) -> None:
        choice |= {"text": said, "finish_reason": finish_reason}
        if "token_ids" in choice:
            choice["token_ids"] = said_ids

    data = write_jsonl(tmp_path / "p.jsonl", [{"id": 0, "prompt": "2+2?"}])
    with Server(Hashing(), opened) as server:
        server.dialect, server.change = dialect, change
        found, _ = ask(server, data, tmp_path / "o.jsonl")
    row = found[0]
    assert row["messages"][1]["content"] == f"<think>\n{said}"
    prompt = opened.prompt_ids([Message(role="user", content="2+2?")]).tolist()
    assert row.get("input_ids", prompt + said_ids) == prompt + said_ids
    conversation = parse_record({"messages": row["messages"], "finish_reason": finish_reason})
    assert isinstance(conversation, Conversation)
    tokens = opened.tokenize(conversation)
    assert isinstance(tokens, MaskedTokens)
    supervised = tokens.token_ids[tokens.loss_mask == 1].tolist()
    if "be</think>" in said:  # the template writes line breaks of its own before the tag
        assert supervised[-10:] == said_ids[-10:]
    else:
        assert tokens.token_ids.tolist()[: len(prompt + said_ids)] == prompt + said_ids
        assert supervised == said_ids


def test_a_chat_answer_that_was_cut_off_perhaps_within_its_thought_is_refused(
    opened: ChatTemplate, tmp_path: Path
) -> None:
    said = iter(["so it must", "so</think>four", "4"])
    data = write_jsonl(tmp_path / "p.jsonl", [{"id": n, "prompt": f"{n}?"} for n in range(3)])
    with Server(Hashing(), opened) as server:
        server.dialect = "bare"

        def change(choice: dict[str, Any]) -> None:
            choice["message"]["content"] = text = next(said)
            choice["finish_reason"] = "stop" if text == "4" else "length"

        server.change = change
        found, report = ask(server, data, tmp_path / "o.jsonl", is_chat=True, concurrency=1)
    assert (sorted(found), report.num_failed) == ([1, 2], 1)


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "bare"])
@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_chat_keeps_the_reasoning_and_the_ids_that_the_server_saw(
    server: Server, template: ChatTemplate, tmp_path: Path, dialect: str, field: str
) -> None:
    server.dialect, server.reasoning = dialect, {field: "hm"}
    data = prompts(tmp_path / "p.jsonl", 2)
    found, report = ask(server, data, tmp_path / "o.jsonl", is_chat=True)
    expected = locally(template, data, tmp_path / "local.jsonl")
    assert {row["generated_by"] for row in found.values()} == {f"tiny@{dialect}/chat"}
    for name, row in found.items():
        assert row["messages"][-1] == expected[name]["messages"][-1] | {"reasoning_content": "hm"}
        assert row.get("input_ids") == (None if dialect == "bare" else expected[name]["input_ids"])
    assert report.num_text_only == (2 if dialect == "bare" else 0)
    assert report.num_other_prompts == 0


def test_chat_under_another_template_is_counted(
    server: Server, template: ChatTemplate, tmp_path: Path
) -> None:
    server.system = "be brief"
    found, report = ask(
        server, prompts(tmp_path / "p.jsonl", 3), tmp_path / "o.jsonl", is_chat=True
    )
    assert report.num_other_prompts == 4
    assert all("be brief" in template.decode(row["input_ids"]) for row in found.values())


def test_a_server_that_changes_the_prompt_is_refused(server: Server, tmp_path: Path) -> None:
    server.change = lambda choice: choice["prompt_token_ids"].insert(0, 1)
    with pytest.raises(EndpointError, match="answered another prompt than it was sent"):
        ask(server, prompts(tmp_path / "p.jsonl", 1), tmp_path / "o.jsonl")
    assert (tmp_path / "o.jsonl").read_bytes() == b""


def test_other_finish_reasons_are_recorded_and_missing_ends_counted(
    server: Server, tmp_path: Path
) -> None:
    reasons = iter(["stop", "abort", "length"])
    server.change = lambda choice: choice.update(
        finish_reason=next(reasons), token_ids=choice["token_ids"][:-1]
    )
    data = write_jsonl(tmp_path / "p.jsonl", [{"id": n, "prompt": f"{n}?"} for n in range(3)])
    found, report = ask(server, data, tmp_path / "o.jsonl", concurrency=1)
    assert [row["finish_reason"] for row in found.values()] == ["stop", "abort", "length"]
    assert report.finish_reasons == {"stop": 1, "abort": 1, "length": 1}
    assert report.num_without_end == 1


def test_a_busy_server_is_asked_again_and_each_time_is_counted(
    server: Server, template: ChatTemplate, tmp_path: Path
) -> None:
    statuses = {0: 429, 1: 429, 3: 503}
    server.on_request = lambda number, request: (
        (statuses[number], "busy") if number in statuses else None
    )
    data = prompts(tmp_path / "p.jsonl", 5)
    found, report = ask(server, data, tmp_path / "o.jsonl", concurrency=1)
    assert report.retries == {"429": 2, "503": 1}
    assert {("retried: 429", "2"), ("retried: 503", "1")} <= set(rows(report))
    expected = locally(template, data, tmp_path / "local.jsonl")
    assert without(found, "generated_by") == without(expected, "generated_by")


def test_a_conversation_that_is_refused_is_named_and_left_to_the_next_run(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = prompts(tmp_path / "p.jsonl", 6)
    server.on_request = lambda number, request: (
        (400, "too long for me") if "4 " in server.template.decode(request["prompt"]) else None
    )
    found, report = ask(server, data, tmp_path / "o.jsonl")
    assert found.keys() == {f"row-{n}" for n in (0, 1, 2, 3, 5)}
    assert (report.num_answered, report.num_failed) == (5, 1)
    assert f"{data}:5: not answered: status 400: too long for me" in caplog.text
    server.on_request = lambda number, request: None
    num_before = len(server.requests)
    found, report = ask(server, data, tmp_path / "o.jsonl")
    assert (len(found), report.prompts.num_present, report.num_answered) == (6, 5, 1)
    assert len(server.requests) == num_before + 1


def test_a_server_that_dies_is_given_up_and_the_same_call_goes_on_later(
    template: ChatTemplate, tmp_path: Path
) -> None:
    data, out = prompts(tmp_path / "p.jsonl", 40), tmp_path / "o.jsonl"
    with Server(Hashing(), template) as server:

        def die(number: int, request: dict[str, Any]) -> None:
            if number >= 9:
                server._server.socket.close()  # no new connections ...
                raise ConnectionResetError  # ... and those that are open break

        server.on_request = die
        with pytest.raises(EndpointError, match=r"\d\d requests failed in succession.*connection"):
            ask(server, data, out, num_retries=1)
        kept = out.read_bytes()
        assert 1 <= len(kept.splitlines()) <= 9
        server._server.socket = socket.socket()  # for server_close
    with Server(Hashing(), template) as server:
        found, report = ask(server, data, out)
    assert out.read_bytes().startswith(kept)
    assert report.prompts.num_present == len(kept.splitlines())
    expected = locally(template, data, tmp_path / "local.jsonl")
    assert without(found, "generated_by") == without(expected, "generated_by")


def test_a_body_that_nests_too_deeply_fails_its_conversation_alone(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = server._send

    def deeply(http: Any, status: int, body: dict[str, Any]) -> None:
        if len(server.requests) != 2:
            send(http, status, body)
            return
        data = b"[" * 100_000
        http.send_response(200)
        http.send_header("content-length", str(len(data)))
        http.end_headers()
        http.wfile.write(data)

    monkeypatch.setattr(server, "_send", deeply)
    data = write_jsonl(tmp_path / "p.jsonl", [{"id": n, "prompt": f"{n}?"} for n in range(3)])
    found, report = ask(server, data, tmp_path / "o.jsonl", concurrency=1)
    assert (sorted(found), report.num_failed) == ([0, 2], 1)


def test_a_silent_server_times_out(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one row. For the others it may take longer, as it does on a busy machine."""
    send = httpx.Client.request

    def is_silent(request: dict[str, Any]) -> bool:
        return "1 " in server.template.decode(request["prompt"])

    def hang(number: int, request: dict[str, Any]) -> None:
        if is_silent(request):
            server.released.wait()

    def wait_longer(self: httpx.Client, method: str, url: str, json: Any) -> httpx.Response:
        options = {} if json and is_silent(json) else {"timeout": 300}
        return send(self, method, url, json=json, **options)

    server.on_request = hang
    monkeypatch.setattr(httpx.Client, "request", wait_longer)
    data = write_jsonl(
        tmp_path / "p.jsonl", [{"id": n, "prompt": f"{n} is a number"} for n in range(3)]
    )
    found, report = ask(server, data, tmp_path / "o.jsonl", timeout_seconds=1.5, num_retries=1)
    server.released.set()
    assert sorted(found) == [0, 2]
    assert (report.num_failed, report.retries) == (1, {"timeout": 1})


def test_another_model_is_refused_before_anything_is_asked(server: Server, tmp_path: Path) -> None:
    data = prompts(tmp_path / "p.jsonl", 2)
    with pytest.raises(EndpointError, match=r"does not serve 'other', but 'tiny'\. Set --model"):
        ask(server, data, tmp_path / "o.jsonl", model="other")
    assert not server.requests
    server.has_models = False
    with pytest.raises(EndpointError, match=r"status 404 \(The model `other` does not exist"):
        ask(server, data, tmp_path / "o.jsonl", model="other")
    found, _ = ask(server, data, tmp_path / "p2.jsonl")
    assert {row["generated_by"] for row in found.values()} == {"tiny@server/completions"}


def test_an_absent_server_is_one_line() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody else gets the port, and nobody listens there
        config = endpoint_config(f"http://127.0.0.1:{silent.getsockname()[1]}/v1")
        with (
            Dispatcher(Endpoint(config, eos_ids=frozenset({2}))) as dispatcher,
            pytest.raises(EndpointError, match=r"connection \(ConnectError.*asked 3 times\. Start"),
        ):
            dispatcher.describe()


def test_what_was_written_stays_on_interrupt_and_nobody_waits_for_the_server(
    server: Server, template: ChatTemplate, tmp_path: Path
) -> None:
    def interrupt(number: int, request: dict[str, Any]) -> None:
        if number == 6:
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, signal.SIGINT)
        if number >= 6:
            server.released.wait()

    server.on_request = interrupt
    data, out = prompts(tmp_path / "p.jsonl", 20), tmp_path / "o.jsonl"
    with pytest.raises(KeyboardInterrupt):
        ask(server, data, out, concurrency=2)
    assert not server.released.is_set()
    kept = out.read_bytes()
    server.released.set()
    server.on_request = lambda number, request: None
    found, _ = ask(server, data, out)
    assert out.read_bytes().startswith(kept)
    assert len(found) == len(out.read_text().splitlines()) == 20


def test_no_more_prompts_are_read_than_are_worked_on(
    server: Server, template: ChatTemplate, tmp_path: Path
) -> None:
    data = write_jsonl(
        tmp_path / "p.jsonl", [{"id": n, "prompt": f"{n} is a number"} for n in range(40)]
    )
    most_open = 0

    class Watched(Batches):
        """Looks at how many rows were taken whenever some are done."""

        def answer(self, exchanges: Any, sampling: Sampling) -> Any:
            nonlocal most_open
            num_taken = num_done = 0

            def counted() -> Any:
                nonlocal num_taken
                for exchange in exchanges:
                    num_taken += 1
                    yield exchange

            for ended in self.inner.answer(counted(), sampling):
                most_open = max(most_open, num_taken - num_done)
                num_done += len(ended)
                yield ended

        inner: Answerer

    batches = Watched(Hashing(), 1)
    batches.inner = Batches(Hashing(), 1)
    assert len(through(batches, template, data, tmp_path / "a.jsonl")[0]) == 40
    assert most_open == 16
    most_open = 0
    config = EndpointConfig(
        url=server.url,
        model=MODEL,
        concurrency=3,
        is_chat=False,
        is_plain=False,
        timeout_seconds=300,
        num_retries=0,
    )
    with Dispatcher(Endpoint(config, eos_ids=frozenset({2}))) as dispatcher:
        batches.inner = dispatcher
        assert len(through(batches, template, data, tmp_path / "b.jsonl")[0]) == 40
    assert most_open == 6


@pytest.mark.parametrize(
    ("ahead", "takes"),
    [
        pytest.param(["long " * 50], 9, id="too-long"),
        pytest.param(["a", "b", "long " * 50], 9, id="too-long-of-three-messages"),
        pytest.param(["a"], 2, id="refused-by-the-template"),
    ],
)
def test_a_later_turn_that_cannot_be_asked_is_left_out(
    ahead: list[str], takes: int, tiny_target: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    refuse = "{% if messages|length > " + str(takes) + " %}{{ raise_exception('no') }}{% endif %}"
    tokenizer.chat_template = refuse + CHATML
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "?"}]
    turns += [{"role": "user", "content": content} for content in ahead]
    data = write_jsonl(tmp_path / "p.jsonl", [{"id": 0, "messages": turns}])
    template = ChatTemplate(tokenizer, {})
    found, report = through(Batches(Hashing(), 4), template, data, tmp_path / "o.jsonl")
    assert [m["role"] for m in found[0]["messages"]] == ["user", "assistant"]
    assert template.decode(found[0]["input_ids"]).endswith("<|im_end|>")
    assert report.num_turns_left_out == 1


@pytest.fixture
def config(tmp_path: Path, tiny_target: Path) -> Path:
    path = tmp_path / "cache.toml"
    path.write_text(
        f'[cache]\npath = "{tmp_path}/c"\n[target]\npath = "{tiny_target}"\ndtype = "float32"\n'
        '[data]\nsources = ["-"]\nmax_length = 256\n'
    )
    return path


def test_the_command_takes_its_key_from_the_environment_and_shows_it_nowhere(
    server: Server,
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.key = "sk-secret"
    data, out = prompts(tmp_path / "p.jsonl", 3), tmp_path / "o.jsonl"
    command = ["regenerate", "--config", str(config), "--endpoint", server.url, "--model", MODEL]
    command += [str(data), "-o", str(out), "--max-new-tokens", "12", "--retries", "0"]
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    result = CliRunner().invoke(main, command)
    assert isinstance(result.exception, EndpointError)
    assert "OPENAI_API_KEY is not set" in str(result.exception)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    result = CliRunner().invoke(main, command)
    assert "status 401 (Unauthorized: Bearer ***). OPENAI_API_KEY is not" in str(result.exception)
    monkeypatch.setenv("OPENAI_API_KEY", server.key)
    server.on_request = lambda number, request: (400, "no") if number == 0 else None
    result = CliRunner().invoke(main, command)
    assert isinstance(result.exception, EndpointError)
    assert "1 conversations were not answered" in str(result.exception)
    assert "not answered                1" in result.output
    result = CliRunner().invoke(main, command)
    assert result.exception is None, result.output
    assert len(read(out)) == 3
    assert "sk-" not in out.read_text() + result.output + caplog.text
    with pytest.raises(DataError, match="answered by"):
        CliRunner().invoke(main, [*command, "--plain"], catch_exceptions=False)
    thinking = ["--set", "data.template_arguments.enable_thinking=true"]
    with pytest.raises(DataError, match="'enable_thinking': True"):
        CliRunner().invoke(main, [*command, *thinking], catch_exceptions=False)
    assert len(read(out)["row-0"]["rendered_by"]) == 16
    assert read(out)["row-0"]["sampling"] == {
        "max_new_tokens": 12,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 0,
    }


@pytest.mark.parametrize("proxy", ["foo://me:secret@x:1", "http://me:secret@x:port", "ht!tp://[x"])
def test_a_proxy_that_is_none_is_named_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    with pytest.raises(EndpointError, match="HTTP_PROXY, HTTPS_PROXY or ALL_PROXY") as raised:
        Endpoint(endpoint_config("http://server:1/v1"), eos_ids=frozenset({2}))
    assert "secret" not in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize("key", ["sk-secret\n", " sk-secret\r\n", "sk-secret"])
def test_white_space_around_the_key_is_not_sent(server: Server, key: str) -> None:
    server.key = "sk-secret"
    endpoint = Endpoint(endpoint_config(server.url), eos_ids=frozenset({2}), api_key=key)
    with Dispatcher(endpoint) as dispatcher:
        assert dispatcher.describe() == "tiny@vllm/completions"


@pytest.mark.parametrize("key", ["sk-secret\nmore", "sk-secr\u00e9t", "sk-secret\x7f", "sk\ud800"])
def test_a_key_that_no_header_holds_is_refused_unseen(key: str) -> None:
    with pytest.raises(EndpointError, match=r"OPENAI_API_KEY.*printable ASCII") as caught:
        Endpoint(endpoint_config("http://localhost:1/v1"), eos_ids=frozenset({2}), api_key=key)
    assert "sk" not in str(caught.value)


def test_a_key_that_the_server_sends_back_out_of_protocol_is_not_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def echo() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"you said sk-secret\r\n\r\n")

        threading.Thread(target=echo, daemon=True).start()
        config = endpoint_config(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", num_retries=1)
        endpoint = Endpoint(config, eos_ids=frozenset({2}), api_key="sk-secret")
        with (
            Dispatcher(endpoint) as dispatcher,
            pytest.raises(EndpointError, match=r"connection .*you said \*\*\*.*asked 2 times"),
        ):
            dispatcher.describe()
    assert "asked again" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "m"], "--model means nothing without --endpoint"),
        (["--endpoint", "http://h/v1"], "--endpoint needs --model"),
        (
            ["--endpoint", "http://h/v1", "--model", "m", "--name", "n"],
            "--name means nothing with --endpoint",
        ),
        (["--endpoint", "h:8000", "--model", "m"], "expected a URL such as"),
        (["--endpoint", "http://999.1.1.1/v1", "--model", "m"], "expected a URL such as"),
        (["--endpoint", "http://h\x7f/v1", "--model", "m"], "expected a URL such as"),
        (["--endpoint", "http://u:sk@h/v1", "--model", "m"], "must hold no password"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    options: list[str], message: str, config: Path, tmp_path: Path
) -> None:
    command = ["regenerate", "--config", str(config), "p.jsonl", "-o", str(tmp_path / "o.jsonl")]
    result = CliRunner().invoke(main, [*command, *options])
    assert result.exit_code == 2
    assert message in result.output
