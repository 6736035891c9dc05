"""Models that other servers have: a real second server, and one that misbehaves, behind a real server."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from helpers_server import Server, serving, wait_until
from helpers_upstream import BEHAVIOURS, SECRET, BadServer, bad_server
from penstock.gateway.front.auth import key_digest

HTTP = httpx.Client(timeout=60)
KEYS = {
    "admin": 'tenant = "operators"\nroles = ["inference", "metadata", "metrics", "admin"]',
    "user": 'tenant = "user"\nmodels = ["remote", "falls-back", "own-llm"]',
    "poor": 'tenant = "poor"\ntokens_per_day = 5',
}
ADMIN = {"authorization": "Bearer admin"}
QUICK = {"idle_timeout": 1, "first_token_timeout": 1, "answer_timeout": 1, "health": "", "eject_after": 1000}
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
                *("--model-repository", str(repository), "--model-control-mode=explicit", "--load-model=*"),
            ) as front:
                yield Fleet(front, inner, bad, other, repository)
        finally:
            inner.close()


def _settings(folder: Path, inner: Server, bad: BadServer, silent: BadServer, other: BadServer) -> list[dict[str, Any]]:
    key = {"api_key_file": str(folder / "secret")}
    remote = {"name": "remote", "url": inner.url, "model": "inner-llm", "headers": {"x-team": "a"}}
    misbehaving = [{"name": name, "url": bad.url + "/v1", **QUICK, **key} for name in BEHAVIOURS if name != "endless"]
    down = {"name": "down", "url": f"http://127.0.0.1:{_free_port()}", **QUICK}
    return [
        remote | key,
        *misbehaving,
        {"name": "endless", "url": bad.url, "health": ""},
        {"name": "headers", "url": bad.url, "headers": {"x-team": "a"}, **QUICK, **key},
        {"name": "vectors", "url": bad.url, "apis": ["embeddings"], **QUICK},
        down,
        {"name": "one-is-down", "url": [down["url"], bad.url], "model": "good", **QUICK},
        {"name": "falls-back", "url": bad.url, "model": "500", "fallbacks": ["down", "own-llm"], **QUICK},
        {"name": "falls-to-other", "url": bad.url, "model": "503-busy", "fallbacks": ["missing", "good"], **QUICK},
        {"name": "hedged", "url": [silent.url, other.url], "hedge_after": 0.1, **QUICK, "first_token_timeout": 30},
        {"name": "narrow", "url": bad.url, "model": "slow", "max_in_flight": 1, **QUICK, "idle_timeout": 60},
        {"name": "ejected", "url": bad.url, "model": "500", **QUICK, "eject_after": 2, "eject_seconds": 600},
    ]


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def _repository(folder: Path, secret: Path, inner: Server) -> Path:
    version = folder / "stored" / "1"
    version.mkdir(parents=True)
    (folder / "stored" / "config.pbtxt").write_text('backend: "openai"')
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


def test_vectors(fleet: Fleet) -> None:
    client = fleet.front.client("admin")
    answer = client.embeddings.create(model="vectors", input="x", encoding_format="float")
    assert answer.data[0].embedding == [0.5, 0.25]
    assert answer.model == "vectors"
    with pytest.raises(openai.BadRequestError, match="only by /v1/embeddings"):
        client.chat.completions.create(model="vectors", messages=MESSAGES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
        ("/v1/responses", {"input": "hello"}),
        ("/api/chat", {"messages": MESSAGES}),
        ("/tokenize", {"prompt": "hello"}),
    ],
)
def test_other_apis_say_by_which_it_can_be_asked(fleet: Fleet, path: str, body: dict[str, Any]) -> None:
    answer = HTTP.post(fleet.front.url + path, json=body | {"model": "remote"}, headers=ADMIN)
    assert answer.status_code == 400
    assert "another server's" in answer.text


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
    assert HTTP.get(f"{fleet.front.url}/usage?by=prompt", headers=ADMIN).status_code == 400


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


def test_metrics(fleet: Fleet) -> None:
    ask(fleet, "remote", max_tokens=4)
    metrics = HTTP.get(f"{fleet.front.url}/metrics", headers=ADMIN).text
    for family in (
        *("healthy", "in_flight", "requests_total", "ejections_total", "first_byte_seconds_bucket"),
        *("retries_total", "hedges_total", "tokens_total", "fallbacks_total"),
    ):
        assert f"penstock_upstream_{family}{{" in metrics
    assert SECRET not in metrics
