"""A server with a key file, and what its tenants may do, with real clients."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from penstock.gateway.requests.access import key_digest
from support.server import Server, serving, wait_until

KEYS = {
    "user": 'tenant = "user"',
    "admin": 'tenant = "boss"\nroles = ["inference", "metadata", "metrics", "admin"]',
    "scraper": 'tenant = "scraper"\nroles = ["metrics"]',
    "elsewhere": 'tenant = "elsewhere"\nmodels = ["other-*"]',
    "few": 'tenant = "few"\nrequests_per_minute = 2',
    "few-grpc": 'tenant = "few"\nrequests_per_minute = 2',
    "small": 'tenant = "small"\ntokens_per_minute = 50',
    "one": 'tenant = "one"\nconcurrent_requests = 1',
}


def entry(key: str, rest: str) -> str:
    return f'[[key]]\nsha256 = "{key_digest(key.encode()).hex()}"\n{rest}\n'


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text("".join(entry(key, rest) for key, rest in KEYS.items()))
    return path


@pytest.fixture(scope="module")
def server(key_file: Path) -> Iterator[Server]:
    simulated = ("--engine", "simulated", "--sim-step-ms", "5", "--served-model-name", "m")
    restricted = (
        "--http-restricted-api",
        "statistics:extra=word",
        "--grpc-restricted-protocol",
        "statistics:extra=word",
    )
    with serving(*simulated, "--api-key-file", str(key_file), *restricted) as running:
        yield running


def client(server: Server, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def complete(server: Server, key: str, **options: Any) -> Any:
    wanted = {"model": "m", "prompt": [300, 301], "max_tokens": 3} | options
    return client(server, key).completions.with_raw_response.create(**wanted)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_who_may_do_what(server: Server) -> None:
    assert complete(server, "user").parse().usage.completion_tokens == 3
    with pytest.raises(openai.AuthenticationError):
        complete(server, "nobody")
    with pytest.raises(openai.PermissionDeniedError, match="role 'inference'"):
        complete(server, "scraper")
    for path in ("/v2/repository/models/m/unload", "/v2/logging", "/v2/trace/setting"):
        assert httpx.post(server.url + path, headers=bearer("user"), json={}).status_code == 403
    assert httpx.post(server.url + "/v2/logging", headers=bearer("admin"), json={}).status_code == 200
    assert httpx.get(server.url + "/metrics", headers=bearer("scraper")).status_code == 200
    assert httpx.get(server.url + "/v1/models", headers=bearer("scraper")).status_code == 403


def test_operators_views_are_for_admins_and_scrapers_on_this_machine_need_no_key(server: Server) -> None:
    assert httpx.get(server.operator + "/metrics").status_code == 200
    assert httpx.get(server.operator + "/debug/requests").status_code == 403
    assert httpx.get(server.operator + "/debug/requests", headers=bearer("user")).status_code == 403
    assert httpx.get(server.operator + "/debug/requests", headers=bearer("admin")).status_code == 200


def test_a_key_for_other_models(server: Server) -> None:
    assert client(server, "elsewhere").models.list().data == []
    for ask in (lambda: complete(server, "elsewhere"), lambda: client(server, "elsewhere").models.retrieve("m")):
        with pytest.raises(openai.PermissionDeniedError, match="may not use the model `m`"):
            ask()
    with triton.InferenceServerClient(server.grpc) as kserve:
        for name in ("text_input", "a_guess"):  # what the model takes is not told either
            text = triton.InferInput(name, [1], "BYTES")
            text.set_data_from_numpy(np.array([b"hello"], dtype=object))
            with pytest.raises(InferenceServerException, match="may not use the model") as refused:
                kserve.infer("m", [text], headers=bearer("elsewhere"))
            assert refused.value.status() == "StatusCode.PERMISSION_DENIED"
    for way, guess in (
        ("infer", {"inputs": [{"name": "a_guess", "shape": [1], "datatype": "FP32", "data": [1]}]}),
        ("generate", {}),
    ):
        answer = httpx.post(f"{server.url}/v2/models/m/{way}", headers=bearer("elsewhere"), json=guess)
        assert (answer.status_code, "may not use" in answer.text) == (403, True), answer.text


def test_requests_per_minute(server: Server) -> None:
    headers = [complete(server, "few").headers for _ in range(2)]
    assert [each["x-ratelimit-remaining-requests"] for each in headers] == ["1", "0"]
    assert headers[0]["x-ratelimit-limit-requests"] == "2"
    with pytest.raises(openai.RateLimitError, match="2 requests per minute") as refused:
        complete(server, "few")
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 30
    assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.value.code == "rate_limit_exceeded"
    assert httpx.get(server.url + "/v1/models", headers=bearer("few")).status_code == 200


def test_requests_per_minute_over_grpc(server: Server) -> None:
    """Each request of a stream counts, and the stream goes on."""
    with triton.InferenceServerClient(server.grpc) as kserve:
        answers: list[Any] = []
        kserve.start_stream(lambda result, error: answers.append((result, error)), headers=bearer("few-grpc"))
        for number in range(3):
            text = triton.InferInput("text_input", [1], "BYTES")
            text.set_data_from_numpy(np.array([b"hello"], dtype=object))
            kserve.async_stream_infer("m", [text], request_id=str(number), parameters={"max_tokens": 2})
        kserve.stop_stream()
        errors = [str(error) for _, error in answers if error is not None]
        assert len(errors) == 1
        assert "This key allows 2 requests per minute" in errors[0]
        with pytest.raises(InferenceServerException) as refused:
            kserve.infer("m", [text], headers=bearer("few-grpc"))
    assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


def test_tokens_per_minute_are_paid_by_use(server: Server) -> None:
    stream = client(server, "small").completions.create(model="m", prompt=[300] * 10, max_tokens=20, stream=True)
    assert sum(1 for _ in stream) > 1
    left = int(httpx.get(server.url + "/v1/models", headers=bearer("small")).headers["x-ratelimit-remaining-tokens"])
    assert 20 <= left <= 25
    complete(server, "small", prompt=[300] * 30)
    with pytest.raises(openai.RateLimitError, match="50 tokens per minute"):
        complete(server, "small")


def test_one_request_at_a_time(server: Server) -> None:
    user = client(server, "one")
    with user.completions.create(model="m", prompt=[300], max_tokens=2000, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="1 requests at one time"):
            complete(server, "one")
    server_is_free(server)


def server_is_free(server: Server) -> None:
    """The place of a stream whose client has left is free again."""

    def let_in() -> bool:
        try:
            complete(server, "one")
        except openai.RateLimitError:
            return False
        return True

    wait_until(let_in)


def test_restricted_apis(server: Server) -> None:
    with triton_http.InferenceServerClient(server.url.removeprefix("http://")) as kserve:
        with pytest.raises(InferenceServerException, match="This API is restricted, expecting header 'extra'"):
            kserve.get_inference_statistics(headers=bearer("user"))
        assert kserve.get_inference_statistics(headers=bearer("user") | {"extra": "word"})
    with triton.InferenceServerClient(server.grpc) as kserve:
        given = bearer("user")
        with pytest.raises(InferenceServerException, match="expecting header 'triton-grpc-protocol-extra'"):
            kserve.get_inference_statistics(headers=given)
        assert kserve.get_inference_statistics(headers=given | {"triton-grpc-protocol-extra": "word"})


def test_keys_change_while_the_server_runs(server: Server, key_file: Path) -> None:
    before = key_file.read_text()
    with pytest.raises(openai.AuthenticationError):
        complete(server, "new")
    key_file.write_text(before + entry("new", 'tenant = "new"'))
    server.process.send_signal(signal.SIGHUP)
    server.wait_for_log("read the key file again: 9 keys")
    complete(server, "new")
    key_file.write_text("[[key")
    server.process.send_signal(signal.SIGHUP)
    server.wait_for_log("the keys stay as they are: api-key-file: .*keys.toml")
    complete(server, "new")
    key_file.write_text(before)
    server.process.send_signal(signal.SIGHUP)
    server.wait_for_log("read the key file again: 8 keys")
    with pytest.raises(openai.AuthenticationError):
        complete(server, "new")


def test_a_flood_of_one_key_leaves_the_others_alone(server: Server) -> None:
    def try_it(_: int) -> str:
        try:
            complete(server, "few")
        except openai.RateLimitError:
            return "limited"
        return "served"

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(try_it, range(40)))
        assert outcomes.count("limited") >= 36
    assert complete(server, "user").parse().choices
    text = httpx.get(server.operator + "/metrics").text
    assert 'outcome="limited"' in text
