"""Models that other servers have: a real second server, and one that misbehaves, behind a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from penstock.gateway.requests.access import key_digest
from support.server import Server, free_port, serving, wait_until
from support.upstream import BEHAVIOURS, SECRET, BadServer, bad_server

HTTP = httpx.Client(timeout=60)
KEYS = {
    "admin": 'tenant = "operators"\nroles = ["inference", "metadata", "metrics", "admin"]',
    "user": 'tenant = "user"\nmodels = ["remote", "falls-back", "own-llm"]',
    "public": 'tenant = "public"\nmodels = ["public*"]',
    "falls": 'tenant = "falls"\nmodels = ["public*", "own-llm"]',
    "poor": 'tenant = "poor"\ntokens_per_day = 5',
}
ADMIN = {"authorization": "Bearer admin"}
QUIET = {"health": "", "eject_after": 1000}
"""The server is neither asked for its health nor passed by."""
IMPATIENT = {"idle_timeout": 1, "first_token_timeout": 1, "answer_timeout": 1}
"""With what is silent; a server that answers may be slow on a busy machine."""
MESSAGES = [{"role": "user", "content": "say hello"}]


class Fleet(NamedTuple):
    front: Server
    inner: Server
    bad: BadServer
    other: BadServer
    repository: Path


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("upstream")
    keys = "".join(f'[[key]]\nsha256 = "{key_digest(key.encode()).hex()}"\n{rest}\n' for key, rest in KEYS.items())
    (folder / "keys.toml").write_text(keys)
    (folder / "secret").write_text(SECRET + "\n")
    simulated = ("penstock-demo", "--engine", "simulated", "--served-model-name")
    with bad_server() as bad, bad_server("silent") as silent, bad_server() as other:
        inner = Server(*simulated, "inner-llm", "--sim-step-ms", "1", "--api-key", SECRET)
        try:
            inner.wait_ready()
            settings = {"upstream": _settings(folder, inner, bad, silent, other)}
            (folder / "penstock.yaml").write_text(json.dumps(settings))
            repository = _repository(folder / "models", folder / "secret", inner)
            with serving(
                *simulated,
                "own-llm",
                *("--config", str(folder / "penstock.yaml"), "--data-dir", str(folder / "data")),
                *("--api-key-file", str(folder / "keys.toml"), "--heartbeat-s", "0.3"),
                *("--model-repository", str(repository), "--model-control-mode=explicit", "--load-model=stored"),
                "--load-on-demand",
            ) as front:
                yield Fleet(front, inner, bad, other, repository)
        finally:
            inner.close()


def _settings(folder: Path, inner: Server, bad: BadServer, silent: BadServer, other: BadServer) -> list[dict[str, Any]]:
    key = {"api_key_file": str(folder / "secret")}
    remote = {"name": "remote", "url": inner.url, "model": "inner-llm", "headers": {"x-team": "a"}}
    misbehaving = [
        {"name": name, "url": bad.url + "/v1", **QUIET, **key, **(IMPATIENT if name in ("silent", "slow") else {})}
        for name in BEHAVIOURS
        if name != "endless"
    ]
    down = {"name": "down", "url": f"http://127.0.0.1:{free_port()}", **QUIET}
    return [
        remote | key,
        *misbehaving,
        {"name": "endless", "url": bad.url, "health": ""},
        {"name": "headers", "url": bad.url, "headers": {"x-team": "a"}, **QUIET, **key},
        {"name": "vectors", "url": bad.url, "apis": ["embeddings"], **QUIET},
        down,
        {"name": "one-is-down", "url": [down["url"], bad.url], "model": "good", **QUIET},
        {"name": "falls-back", "url": bad.url, "model": "500", "fallbacks": ["down", "own-llm"], **QUIET},
        {"name": "falls-to-other", "url": bad.url, "model": "503-busy", "fallbacks": ["missing", "good"], **QUIET},
        {"name": "hedged", "url": [silent.url, other.url], "hedge_after": 0.1, **QUIET},
        {"name": "good-too", "url": bad.url, "model": "good", **QUIET},
        {"name": "chats-only", "url": bad.url, "model": "good", "apis": ["chat"], **QUIET},
        {"name": "narrow", "url": bad.url, "model": "slow", "max_in_flight": 1, **QUIET},
        {"name": "ejected", "url": bad.url, "model": "500", **QUIET, "eject_after": 2, "eject_seconds": 600},
        {"name": "breaks", "url": bad.url, "model": "cut", **QUIET, "eject_after": 2, "eject_seconds": 600},
    ]


def _repository(folder: Path, secret: Path, inner: Server) -> Path:
    for name in ("stored", "later", "later-still"):
        version = folder / name / "1"
        version.mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text('backend: "openai"')
        (version / "key").write_text(secret.read_text())
        settings = {"url": inner.url, "model": "inner-llm", "api_key_file": "key"}
        (version / "model.json").write_text(json.dumps(settings))
    return folder


def ask(fleet: Fleet, model: str, *, key: str = "admin", **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": MESSAGES} | fields
    headers = {"authorization": f"Bearer {key}"}
    return HTTP.post(f"{fleet.front.url}/v1/chat/completions", json=body, headers=headers)


def events(answer: httpx.Response) -> list[Any]:
    """Of a stream that is a good one as far as its form goes: it ends with one last word."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    data = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert data.index("[DONE]") == len(data) - 1
    return [json.loads(each) for each in data[:-1]]


def text_of(chunks: list[Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for each in chunks for choice in each.get("choices", ()))


def test_an_answer_is_the_other_server_s_under_the_public_name(fleet: Fleet) -> None:
    front, inner = fleet.front.client("admin"), fleet.inner.client(SECRET)
    same = {"messages": MESSAGES, "max_tokens": 20, "seed": 5}
    ours = front.chat.completions.create(model="remote", **same)  # type: ignore[call-overload]
    theirs = inner.chat.completions.create(model="inner-llm", **same)  # type: ignore[call-overload]
    assert ours.choices == theirs.choices
    assert ours.usage == theirs.usage
    assert ours.model == "remote"
    texts = [
        client.completions.create(model=model, prompt="once", max_tokens=5, temperature=0)
        for client, model in ((front, "remote"), (inner, "inner-llm"))
    ]
    assert texts[0].model == "remote"
    assert texts[0].choices == texts[1].choices


@pytest.mark.parametrize("asks_usage", [False, True])
def test_streams_are_relayed_and_usage_is_shown_only_where_it_was_asked_for(fleet: Fleet, asks_usage: bool) -> None:
    client = fleet.front.client("admin")
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if asks_usage else {}
    stream = client.chat.completions.create(
        model="remote", messages=MESSAGES, max_tokens=20, temperature=0, stream=True, **options
    )  # type: ignore[call-overload]
    chunks = list(stream)
    assert {chunk.model for chunk in chunks} == {"remote"}
    whole = client.chat.completions.create(model="remote", messages=MESSAGES, max_tokens=20, temperature=0)  # type: ignore[arg-type]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert usages == ([whole.usage] if asks_usage else [])
    assert all("usage" not in chunk.model_fields_set for chunk in chunks) or asks_usage


BAD_STREAMS = {
    "cut": "the connection ended before the answer did",
    "garbage": "it is not JSON",
    "error-event": "wrong key ***",
    "slow": "silent for 1 seconds",
    "no-end": "it ended in the middle",
}


@pytest.mark.parametrize("model", BAD_STREAMS)
def test_what_breaks_in_the_middle_is_one_error_event(fleet: Fleet, model: str) -> None:
    answer = ask(fleet, model, stream=True)
    assert answer.status_code == 200
    *good, last = events(answer)
    assert text_of(good)
    assert BAD_STREAMS[model] in last["error"]["message"]
    assert not any("error" in each for each in good)
    assert SECRET not in answer.text


BAD_ANSWERS = {
    "cut-before-text": (502, "upstream_error"),
    "no-choices": (502, "upstream_error"),
    "no-http": (502, "upstream_error"),
    "first-error-event": (502, "upstream_error"),
    "huge-header": (502, "upstream_error"),
    "huge-line": (502, "upstream_error"),
    "no-stream": (502, "upstream_error"),
    "zipped": (502, "upstream_error"),
    "500": (502, "upstream_error"),
    "401": (502, "upstream_error"),
    "429": (429, "upstream_rate_limited"),
    "silent": (504, "upstream_timeout"),
    "down": (503, "upstream_unavailable"),
    "400": (400, None),
    "too-long": (400, "context_length_exceeded"),
}


@pytest.mark.parametrize("model", BAD_ANSWERS)
def test_what_fails_before_the_first_byte_has_a_status(fleet: Fleet, model: str) -> None:
    answer = ask(fleet, model, stream=True)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == BAD_ANSWERS[model]
    assert SECRET not in answer.text
    assert str(fleet.bad.port) not in answer.text
    if model == "429":
        assert answer.headers["retry-after"] == "30"
        assert error["type"] == "rate_limit_error"
    if model == "400":
        assert error["param"] == "temperature"


def test_no_secret_is_in_the_log(fleet: Fleet) -> None:
    ask(fleet, "401")
    fleet.front.wait_for_log("does not accept this server's key")
    assert not any(SECRET in line for line in fleet.front.log)


def test_a_stream_without_its_last_word_gets_one(fleet: Fleet) -> None:
    assert text_of(events(ask(fleet, "no-last-word", stream=True))) == "done"


@pytest.mark.parametrize(("model", "tries"), [("503-then-ok", 2), ("429-then-ok", 2), ("401", 1), ("500", 1)])
def test_only_what_may_pass_is_tried_again(fleet: Fleet, model: str, tries: int) -> None:
    before = fleet.bad.counts[model]
    answer = ask(fleet, model)
    assert fleet.bad.counts[model] - before == tries
    assert (answer.status_code == 200) == ("ok" in model)


def test_a_server_that_is_down_is_passed_by(fleet: Fleet) -> None:
    for _ in range(4):
        assert ask(fleet, "one-is-down").json()["choices"][0]["message"]["content"] == "all good"


def test_another_model_answers_when_no_server_can(fleet: Fleet) -> None:
    answer = ask(fleet, "falls-back", key="user", max_tokens=5, temperature=0)
    assert answer.status_code == 200
    assert answer.headers["x-penstock-target"] == "own-llm"
    streamed = ask(fleet, "falls-back", key="user", max_tokens=5, temperature=0, stream=True)
    assert text_of(events(streamed)) == answer.json()["choices"][0]["message"]["content"]
    other = ask(fleet, "falls-to-other")
    assert other.json()["model"] == "falls-to-other"


def test_a_second_server_is_asked_when_the_first_is_slow(fleet: Fleet) -> None:
    for _ in range(2):  # servers take turns
        assert text_of(events(ask(fleet, "hedged", stream=True))) == "all good"


def test_a_server_that_fails_again_and_again_gets_no_requests(fleet: Fleet) -> None:
    answers = [ask(fleet, "ejected") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [502, 502, 503]
    assert int(answers[-1].headers["retry-after"]) > 500


def test_a_server_whose_streams_always_break_gets_no_requests(fleet: Fleet) -> None:
    answers = [ask(fleet, "breaks", stream=True) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 503]


def test_what_another_server_is_sent(fleet: Fleet) -> None:
    span = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = ADMIN | {"traceparent": span, "x-request-id": "my-id"}
    body = {"model": "headers", "messages": MESSAGES, "stream": True, "new_field": [1], "priority": 3, "metadata": {}}
    HTTP.post(f"{fleet.front.url}/v1/chat/completions", json=body, headers=headers)
    asked = fleet.bad.last("headers")
    assert asked.line == "POST /v1/chat/completions HTTP/1.1"
    sent = {name: asked.headers.get(name) for name in ("authorization", "x-team", "traceparent", "x-request-id")}
    expected = {"authorization": f"Bearer {SECRET}", "x-team": "a", "traceparent": span, "x-request-id": "my-id"}
    assert sent == expected
    assert asked.body.keys() == {"model", "messages", "stream", "new_field", "stream_options"}
    assert asked.body["stream_options"] == {"include_usage": True}
    assert ask(fleet, "headers", store=True).json()["error"]["param"] == "store"


def test_a_client_that_leaves_ends_the_request_at_the_other_server(fleet: Fleet) -> None:
    before = fleet.bad.closed["slow"]
    body = {"model": "narrow", "messages": MESSAGES, "stream": True}
    with HTTP.stream("POST", f"{fleet.front.url}/v1/chat/completions", json=body, headers=ADMIN) as answer:
        lines = answer.iter_lines()  # the connection is closed when nobody holds it
        assert next(lines).startswith("data: ")
        full = ask(fleet, "narrow")
        assert (full.status_code, full.json()["error"]["code"]) == (503, "upstream_unavailable")
    wait_until(lambda: fleet.bad.closed["slow"] == before + 1)


def test_a_silent_stream_has_comments(fleet: Fleet) -> None:
    assert ": keep-alive\n\n" in ask(fleet, "slow", stream=True).text


def test_a_client_that_does_not_read_makes_the_other_server_wait(fleet: Fleet) -> None:
    body = {"model": "endless", "messages": MESSAGES, "stream": True}
    with HTTP.stream("POST", f"{fleet.front.url}/v1/chat/completions", json=body, headers=ADMIN) as answer:
        lines = answer.iter_lines()  # the connection is closed when nobody holds it
        assert next(lines).startswith("data: ")
        sent = [-1, fleet.bad.sent]

        def stopped() -> bool:
            sent.append(fleet.bad.sent)
            return len(sent) > 20 and sent[-1] == sent[-20]

        wait_until(stopped)
    assert sent[-1] < 48 << 20


def test_vectors_come_from_a_remote_model_that_refuses_chats(fleet: Fleet) -> None:
    client = fleet.front.client("admin")
    answer = client.embeddings.create(model="vectors", input="x", encoding_format="float")
    assert answer.data[0].embedding == [0.5, 0.25]
    assert answer.model == "vectors"
    with pytest.raises(openai.BadRequestError, match="only by /v1/embeddings"):
        client.chat.completions.create(model="vectors", messages=MESSAGES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
        ("/v1/responses/input_tokens", {"input": "hello"}),
        ("/tokenize", {"prompt": "hello"}),
        ("/v1/messages", {"messages": [*MESSAGES, {"role": "assistant", "content": "go on"}], "max_tokens": 5}),
        ("/api/generate", {"prompt": "x", "raw": True}),
        ("/api/chat", {"messages": MESSAGES, "logprobs": True}),
        ("/api/generate", {"prompt": "x", "context": [1]}),
    ],
)
def test_what_another_server_cannot_be_asked_is_refused(fleet: Fleet, path: str, body: dict[str, Any]) -> None:
    answer = HTTP.post(fleet.front.url + path, json=body | {"model": "remote"}, headers=ADMIN)
    assert answer.status_code == 400
    assert "other server" in answer.text


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": WEATHER}
CALLED = {"id": "c0", "name": "weather", "input": {"city": "Rome"}}
ASKED_BY: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "max_tokens": 50,
        "stop_sequences": ["END"],
        "system": "be short",
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "tool_use", **CALLED}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c0", "content": "sunny"}]},
        ],
        "tools": [{"name": "weather", "input_schema": WEATHER}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    },
    "/v1/responses": {
        "max_output_tokens": 50,
        "instructions": "be short",
        "input": [
            {"role": "user", "content": "hi"},
            {"type": "function_call", "call_id": "c0", "name": "weather", "arguments": '{"city": "Rome"}'},
            {"type": "function_call_output", "call_id": "c0", "output": "sunny"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    "/api/chat": {
        "options": {"num_predict": 50, "stop": ["END"]},
        "messages": [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]},
            {"role": "tool", "content": "sunny"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
    },
}


def post(fleet: Fleet, path: str, model: str, **more: Any) -> httpx.Response:
    body = ASKED_BY[path] | {"model": model, "stream": False} | more
    return HTTP.post(fleet.front.url + path, json=body, headers=ADMIN)


@pytest.mark.parametrize("path", ASKED_BY)
def test_other_apis_become_chats(fleet: Fleet, path: str) -> None:
    assert post(fleet, path, "agent").status_code == 200
    sent = fleet.bad.last("agent").body
    system, user, assistant, tool = sent["messages"]
    assert (system["content"], user["content"], tool["content"]) == ("be short", "hi", "sunny")
    [call] = assistant["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    assert tool["tool_call_id"] == call["id"]
    assert sent["tools"] == [{"type": "function", "function": FUNCTION}]
    assert (sent["max_tokens"], sent["stream"]) == (50, True)
    if path != "/api/chat":
        assert (sent["tool_choice"], sent["parallel_tool_calls"]) == ("required", False)
    if path != "/v1/responses":
        assert sent["stop"] == ["END"]
    assert None not in sent.values()


def test_an_answer_in_anthropics_form(fleet: Fleet) -> None:
    whole = post(fleet, "/v1/messages", "agent").json()
    thought, text, call = whole["content"]
    assert (thought["thinking"], text["text"]) == ("Which city?", "Let me look.")
    assert (call["type"], call["id"], call["name"], call["input"]) == (
        "tool_use",
        "call_1",
        "weather",
        {"city": "Oslo"},
    )
    assert (whole["model"], whole["stop_reason"]) == ("agent", "tool_use")
    usage = {"input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 3}
    assert whole["usage"] == usage
    streamed = post(fleet, "/v1/messages", "agent", stream=True).text
    data = [json.loads(line[6:]) for line in streamed.split("\n") if line.startswith("data: ")]
    opened = [each["content_block"]["type"] for each in data if each["type"] == "content_block_start"]
    assert opened == ["thinking", "text", "tool_use"]
    assert (data[-2]["usage"], data[-1]["type"]) == (usage, "message_stop")
    hidden = post(fleet, "/v1/messages", "agent", thinking={"type": "adaptive", "display": "omitted"}).json()
    assert [block["type"] for block in hidden["content"]] == ["text", "tool_use"]


def test_an_answer_in_the_form_of_responses(fleet: Fleet) -> None:
    whole = post(fleet, "/v1/responses", "agent").json()
    thought, text, call = whole["output"]
    assert thought["content"][0]["text"] == "Which city?"
    assert text["content"][0]["text"] == "Let me look."
    assert (call["type"], call["call_id"], call["arguments"]) == ("function_call", "call_1", '{"city": "Oslo"}')
    assert (whole["status"], whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]) == ("completed", 7, 3)
    follow = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
    next_one = post(fleet, "/v1/responses", "agent", previous_response_id=whole["id"], input=[follow])
    assert next_one.status_code == 200
    assert [each["role"] for each in fleet.bad.last("agent").body["messages"]][-2:] == ["assistant", "tool"]
    streamed = post(fleet, "/v1/responses", "agent", stream=True).text
    last = json.loads(streamed.strip().split("data: ")[-1])
    assert last["type"] == "response.completed"
    assert [item["type"] for item in last["response"]["output"]] == ["reasoning", "message", "function_call"]


def test_how_long_another_server_keeps_its_model_is_no_matter_of_ours(fleet: Fleet) -> None:
    answer = post(fleet, "/api/chat", "agent", keep_alive=0)
    assert (answer.status_code, answer.headers["x-penstock-ignored"]) == (200, "keep_alive")


def test_tools_of_responses_are_functions_for_other_servers(fleet: Fleet) -> None:
    custom = {"type": "custom", "name": "weather"}
    namespace = {"type": "namespace", "name": "mcp__maps", "tools": [{"type": "function", "name": "find"}]}
    tools = {"tools": [namespace, {"type": "web_search"}, custom], "tool_choice": "auto"}
    answer = post(fleet, "/v1/responses", "agent", truncation="auto", **tools)
    assert answer.headers["x-penstock-ignored"] == "tools[].type, truncation"
    sent = fleet.bad.last("agent").body
    assert [each["function"]["name"] for each in sent["tools"]] == ["mcp__maps__find", "weather"]
    assert "truncation" not in sent
    call = answer.json()["output"][-1]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "weather", '{"city": "Oslo"}')


def test_an_answer_in_ollamas_form(fleet: Fleet) -> None:
    whole = post(fleet, "/api/chat", "agent:latest").json()
    message = whole["message"]
    assert (message["thinking"], message["content"]) == ("Which city?", "Let me look.")
    assert message["tool_calls"] == [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]
    assert (whole["done"], whole["prompt_eval_count"], whole["eval_count"]) == (True, 7, 3)
    body = {"model": "good", "prompt": "say it", "system": "now"}
    answer = HTTP.post(f"{fleet.front.url}/api/generate", json=body, headers=ADMIN)
    assert "".join(json.loads(line)["response"] for line in answer.text.splitlines()) == "all good"
    messages = [{"role": "system", "content": "now"}, {"role": "user", "content": "say it"}]
    assert fleet.bad.last("good").body["messages"] == messages


def test_the_text_is_the_same_by_all_apis(fleet: Fleet) -> None:
    direct = ask(fleet, "remote", max_tokens=12, temperature=0).json()["choices"][0]["message"]["content"]
    body = {"model": "remote", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    answer = HTTP.post(f"{fleet.front.url}/v1/messages", json=body, headers=ADMIN).json()
    assert answer["content"][0]["text"] == direct
    assert answer["stop_reason"] == "max_tokens"


FAILED = {"/v1/messages": "event: error", "/v1/responses": "response.failed", "/api/chat": '{"error":'}


@pytest.mark.parametrize("path", ASKED_BY)
def test_errors_have_the_form_of_the_api(fleet: Fleet, path: str) -> None:
    assert post(fleet, path, "500").status_code == 502
    assert post(fleet, path, "first-error-event", stream=True).status_code == 502
    assert post(fleet, path, "cut").status_code == 502
    broken = post(fleet, path, "cut", stream=True)
    assert broken.status_code == 200
    assert FAILED[path] in broken.text
    assert "the connection ended before the answer did" in broken.text
    silent = post(fleet, path, "slow", stream=True).text
    assert "silent for 1 seconds" in silent
    if path == "/v1/messages":
        assert "event: ping" in silent


@pytest.mark.parametrize("path", ASKED_BY)
def test_a_model_of_this_server_answers_other_apis_when_no_server_can(fleet: Fleet, path: str) -> None:
    body: dict[str, Any] = {"model": "falls-back", "stream": False}
    responses = {"input": "say hello", "max_output_tokens": 5}
    body |= responses if path == "/v1/responses" else {"messages": MESSAGES, "max_tokens": 5}
    user = {"authorization": "Bearer user"}
    answer = HTTP.post(fleet.front.url + path, json=body, headers=user)
    assert answer.status_code == 200
    assert answer.headers["x-penstock-target"] == "own-llm"
    assert HTTP.post(fleet.front.url + path, json=body | {"model": "good"}, headers=user).status_code == 403


def test_the_list_of_models(fleet: Fleet) -> None:
    listed = {model.id: model for model in fleet.front.client("admin").models.list()}
    assert {"remote", "stored", "own-llm", "vectors"} <= listed.keys()
    assert fleet.front.client("admin").models.retrieve("remote").root == "inner-llm"
    assert {model.id for model in fleet.front.client("user").models.list()} == {"remote", "falls-back", "own-llm"}
    with pytest.raises(openai.PermissionDeniedError):
        fleet.front.client("user").chat.completions.create(model="good", messages=MESSAGES)  # type: ignore[arg-type]


def test_usage_is_counted_and_budgets_hold(fleet: Fleet) -> None:
    assert ask(fleet, "good", key="poor", stream=True).status_code == 200
    spent = ask(fleet, "own-llm", key="poor")
    assert (spent.status_code, spent.json()["error"]["code"]) == (429, "insufficient_quota")
    assert "5 tokens per day" in spent.json()["error"]["message"]
    query = {"by": "tenant,key,model", "tenant": "poor"}
    answer = HTTP.get(f"{fleet.front.url}/usage", params=query, headers=ADMIN).json()
    assert answer["usage"] == [
        {
            "requests": 1,
            "failed": 0,
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "cached_tokens": 4,
            "tenant": "poor",
            "key": key_digest(b"poor").hex()[:12],
            "model": "good",
        }
    ]
    assert HTTP.get(f"{fleet.front.url}/usage", headers={"authorization": "Bearer user"}).status_code == 403
    refused = HTTP.get(f"{fleet.front.url}/usage?by=prompt", headers=ADMIN)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "by")
    assert HTTP.get(f"{fleet.front.url}/usage?end=0001-01-05", headers=ADMIN).status_code == 200


def test_a_model_of_the_repository_is_also_asked_over_kserve(fleet: Fleet) -> None:
    chat = ask(fleet, "stored", max_tokens=4)
    assert chat.json()["model"] == "stored"
    url = f"{fleet.front.url}/v2/models/stored"
    fields = {"text_input": "once", "parameters": {"max_tokens": 6, "seed": 1}}
    answer = HTTP.post(f"{url}/generate", json=fields | {"exclude_input_in_output": True}, headers=ADMIN).json()
    direct = fleet.inner.client(SECRET).completions.create(model="inner-llm", prompt="once", max_tokens=6, seed=1)
    assert answer["text_output"] == direct.choices[0].text
    streamed = HTTP.post(f"{url}/generate_stream", json=fields | {"stream": True}, headers=ADMIN).text
    pieces = [json.loads(line[6:])["text_output"] for line in streamed.split("\n\n") if line.startswith("data: ")]
    assert "".join(pieces) == direct.choices[0].text
    admin = f"{fleet.front.url}/v2/repository/models/stored"
    assert HTTP.post(f"{admin}/unload", json={}, headers=ADMIN).status_code == 200
    assert ask(fleet, "stored").status_code == 404
    assert HTTP.post(f"{admin}/load", json={}, headers=ADMIN).status_code == 200
    assert ask(fleet, "stored", max_tokens=4).status_code == 200


def test_a_chat_loads_a_model_of_another_server(fleet: Fleet) -> None:
    listed = HTTP.get(f"{fleet.front.url}/v1/models", headers=ADMIN).json()["data"]
    assert [model["owned_by"] for model in listed if model["id"] == "later"] == ["penstock"], (
        "nothing is known of it yet"
    )
    assert ask(fleet, "later", max_tokens=4, unknown_field=1).json()["model"] == "later"
    assert HTTP.get(f"{fleet.front.url}/v1/models/later", headers=ADMIN).json()["owned_by"] == "upstream"


def test_a_rule_s_target_of_another_server_is_loaded_by_its_requests(fleet: Fleet) -> None:
    put_rule(fleet, "public-later", "later-still", "own-llm")
    targets = set()
    for _ in range(20):
        answer = ask(fleet, "public-later", max_tokens=2)
        assert (answer.status_code, answer.json()["model"]) == (200, "public-later")
        targets.add(answer.headers["x-penstock-target"])
    assert targets == {"later-still", "own-llm"}
    assert rule_state(fleet, "public-later")["targets"][0]["ended"]["ok"] > 0


def test_metrics_have_every_family_and_no_secret(fleet: Fleet) -> None:
    ask(fleet, "remote", max_tokens=4)
    metrics = HTTP.get(f"{fleet.front.url}/metrics", headers=ADMIN).text
    for family in (
        *("healthy", "in_flight", "requests_total", "ejections_total", "first_byte_seconds_bucket"),
        *("retries_total", "hedges_total", "tokens_total", "fallbacks_total"),
    ):
        assert f"penstock_upstream_{family}{{" in metrics
    assert SECRET not in metrics


def put_rule(fleet: Fleet, name: str, *targets: str, **fields: Any) -> None:
    rule = {"targets": [{"model": target} for target in targets], **fields}
    assert HTTP.put(f"{fleet.front.url}/traffic/{name}", json=rule, headers=ADMIN).status_code == 200


def rule_state(fleet: Fleet, name: str) -> dict[str, Any]:
    state: dict[str, Any] = HTTP.get(f"{fleet.front.url}/traffic/{name}", headers=ADMIN).json()
    return state


def test_a_public_name_divides_requests_between_own_models_and_those_of_other_servers(fleet: Fleet) -> None:
    """Over all APIs, by a key that may use no target by its own name."""
    put_rule(fleet, "public", "own-llm", "remote")
    user = {"authorization": "Bearer public"}
    seen = set()
    paths: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 5},
        "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
        "/v1/responses": {"input": "say hello", "max_output_tokens": 5},
        "/api/chat": {"messages": MESSAGES, "stream": False, "options": {"num_predict": 5}},
    }
    for number in range(24):
        path, body = list(paths.items())[number % len(paths)]
        answer = HTTP.post(fleet.front.url + path, json=body | {"model": "public"}, headers=user)
        assert (answer.status_code, answer.json()["model"]) == (200, "public"), answer.text
        seen.add((path, answer.headers["x-penstock-target"]))
    assert {target for _, target in seen} == {"own-llm", "remote"}
    counted = HTTP.post(fleet.front.url + "/tokenize", json={"model": "public", "prompt": "hi"}, headers=user)
    assert counted.json()["count"]
    over_kserve = HTTP.post(f"{fleet.front.url}/v2/models/public/generate", json={"text_input": "hi"}, headers=user)
    assert (over_kserve.status_code, "not a model of this API" in over_kserve.text) == (501, True)
    targets = {each["target"]: each for each in rule_state(fleet, "public")["targets"]}
    assert sum(each["accepted"] for each in targets.values()) == 24
    assert all(each["in_flight"] == 0 and set(each["ended"]) == {"ok"} for each in targets.values())
    assert HTTP.delete(f"{fleet.front.url}/traffic/public", headers=ADMIN).status_code == 200


def test_a_public_name_of_other_servers_alone(fleet: Fleet) -> None:
    put_rule(fleet, "public-far", "good", "500")
    listed = {model.id: model for model in fleet.front.client("admin").models.list()}
    assert listed["public-far"].owned_by == "upstream"
    statuses = {ask(fleet, "public-far", stream=stream).status_code for stream in (True, False) * 8}
    assert statuses == {200, 502}
    targets = {each["target"]: each["ended"] for each in rule_state(fleet, "public-far")["targets"]}
    assert (set(targets["good"]), set(targets["500"])) == ({"ok"}, {"server_error"})
    refused = HTTP.post(fleet.front.url + "/tokenize", json={"model": "public-far", "prompt": "hi"}, headers=ADMIN)
    assert (refused.status_code, "another server's" in refused.text) == (400, True)


def test_a_fallback_answers_for_a_target_and_the_target_has_failed(fleet: Fleet) -> None:
    put_rule(fleet, "public-falls", "falls-back")
    answer = ask(fleet, "public-falls", key="falls", max_tokens=5)
    assert (answer.status_code, answer.headers["x-penstock-target"]) == (200, "own-llm")
    [target] = rule_state(fleet, "public-falls")["targets"]
    assert (target["accepted"], target["ended"]) == (1, {"server_error": 1})


def test_a_target_without_the_request_s_api_gets_none_of_its_requests(fleet: Fleet) -> None:
    put_rule(fleet, "public-mixed", "chats-only", "good")
    body = {"model": "public-mixed", "prompt": "hello"}
    url = fleet.front.url + "/v1/completions"
    answers = [HTTP.post(url, json=body, headers=ADMIN) for _ in range(8)]
    assert {answer.headers["x-penstock-target"] for answer in answers} == {"good"}
    put_rule(fleet, "public-mixed", "chats-only")
    assert "cannot be asked by /v1/completions" in HTTP.post(url, json=body, headers=ADMIN).text
    put_rule(fleet, "public-vectors", "vectors")
    found = HTTP.post(
        fleet.front.url + "/v1/embeddings", json={"model": "public-vectors", "input": "hello"}, headers=ADMIN
    )
    assert (found.status_code, found.json()["model"]) == (200, "public-vectors")
    assert found.headers["x-penstock-target"] == "vectors"


def test_a_rule_for_the_own_name_of_another_server_s_model(fleet: Fleet) -> None:
    put_rule(fleet, "chats-only", "own-llm")
    answer = ask(fleet, "chats-only", max_tokens=5)
    assert (answer.json()["model"], answer.headers["x-penstock-target"]) == ("chats-only", "own-llm")
    ids = [model.id for model in fleet.front.client("admin").models.list()]
    assert ids.count("chats-only") == 1
    assert HTTP.delete(f"{fleet.front.url}/traffic/chats-only", headers=ADMIN).status_code == 200
    assert "x-penstock-target" not in ask(fleet, "chats-only", max_tokens=5).headers


@pytest.mark.parametrize(
    ("target", "shadow", "result"),
    [
        ("good", "good-too", "equal"),
        ("good", "own-llm", "different"),
        ("own-llm", "good", "different"),
        ("good", "500", "failed"),
        ("own-llm", "down", "dropped"),
    ],
)
def test_shadows_of_and_on_other_servers(fleet: Fleet, target: str, shadow: str, result: str) -> None:
    put_rule(fleet, "public-shadow", target, shadow={"model": shadow})
    for fields in ({"temperature": 0}, {"temperature": 0, "stream": True}, {"seed": 1}):
        assert ask(fleet, "public-shadow", max_tokens=5, **fields).status_code == 200
    if target == "good":
        body = {"model": "public-shadow", "messages": MESSAGES, "max_tokens": 5, "temperature": 0}
        assert HTTP.post(fleet.front.url + "/v1/messages", json=body, headers=ADMIN).status_code == 200
    count = 4 if target == "good" else 3
    wait_until(lambda: sum(rule_state(fleet, "public-shadow")["shadow"]["results"].values()) == count)
    assert rule_state(fleet, "public-shadow")["shadow"] == {"in_flight": 0, "results": {result: count}}
    assert [each["accepted"] for each in rule_state(fleet, "public-shadow")["targets"]] == [count]
    assert HTTP.delete(f"{fleet.front.url}/traffic/public-shadow", headers=ADMIN).status_code == 200


def test_shadows_that_cannot_be_compared(fleet: Fleet) -> None:
    put_rule(fleet, "public-shadow", "own-llm", shadow={"model": "good"})
    assert ask(fleet, "public-shadow", max_tokens=5).status_code == 200
    body = {"model": "public-shadow", "messages": MESSAGES, "max_tokens": 5}
    assert HTTP.post(fleet.front.url + "/v1/messages", json=body, headers=ADMIN).status_code == 200
    wait_until(lambda: not rule_state(fleet, "public-shadow")["shadow"]["in_flight"])
    assert rule_state(fleet, "public-shadow")["shadow"]["results"] == {"skipped": 1, "uncompared": 1}
    assert HTTP.delete(f"{fleet.front.url}/traffic/public-shadow", headers=ADMIN).status_code == 200
