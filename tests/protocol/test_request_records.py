"""What an operator sees of requests: a line each, metrics, and who is in flight; with real clients."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from support.server import Server, serving, wait_until


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--engine", "simulated", "--sim-step-ms", "20", "--served-model-name", "m", "--admin-key", "sesame")
    with serving(*flags, "--access-log", "json") as running:
        yield running


KEY = {"authorization": "Bearer sesame"}


def line_of(server: Server, request_id: str) -> dict[str, Any]:
    found = server.wait_for_log(rf'^{{.*"id":"{request_id}".*}}$', 20)
    assert sum(f'"id":"{request_id}"' in line for line in server.log) == 1
    return dict(json.loads(found[0]))


def tail(fields: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(fields[name] for name in ("route", "status", "outcome", "reason"))


def test_a_stream_of_the_openai_sdk(server: Server) -> None:
    stream = server.client("sesame").completions.create(
        model="m", prompt="some text", max_tokens=5, stream=True, extra_headers={"x-request-id": "sdk-1"}
    )
    assert [*stream][-1].choices[0].finish_reason == "length"
    fields = line_of(server, "sdk-1")
    assert tail(fields) == ("/v1/completions", "200", "ok", "")
    assert fields["completion_tokens"] == 5
    assert fields["model"] == "m"
    assert fields["tenant"].startswith("key-")
    assert 0 < fields["ttft_s"] < fields["total_s"]
    assert fields["bytes_in"] > 50
    assert fields["bytes_out"] > 500


@pytest.mark.parametrize(
    ("path", "request_id", "expected"),
    [
        ("/v1/models/m", "get-1", ("/v1/models/{name}", "200", "ok", "")),
        ("/v1/models/none", "get-2", ("/v1/models/{name}", "404", "client_error", "model_not_found")),
        ("/nowhere?x=%0a", "get-3", ("unmatched", "404", "client_error", "route_not_found")),
        ("/v1/completions", "get-4", ("unmatched", "405", "client_error", "method_not_allowed")),
        ("/v2/models/m/config", "get-5", ("/v2/models/{model}/config", "200", "ok", "")),
        (
            "/v2/models/m/versions/9",
            "get-6",
            ("/v2/models/{model}/versions/{version}", "404", "client_error", "model_not_found"),
        ),
        ("/v2/nowhere", "get-7", ("unmatched", "404", "client_error", "route_not_found")),
    ],
)
def test_routes_are_the_servers_words(server: Server, path: str, request_id: str, expected: tuple[str, ...]) -> None:
    httpx.get(server.url + path, headers=KEY | {"x-request-id": request_id})
    assert tail(line_of(server, request_id)) == expected


def test_a_request_without_a_key(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.client("wrong").completions.create(model="m", prompt="x", extra_headers={"x-request-id": "bad-key"})
    fields = line_of(server, "bad-key")
    assert tail(fields) == ("/v1/completions", "401", "denied", "invalid_api_key")
    assert fields["bytes_in"] == 0


def test_a_client_that_leaves(server: Server) -> None:
    body = {"model": "m", "prompt": "x", "max_tokens": 2000, "stream": True}
    headers = KEY | {"x-request-id": "leaves"}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, headers=headers, timeout=60) as response:
        next(response.iter_lines())
    fields = line_of(server, "leaves")
    assert tail(fields) == ("/v1/completions", "200", "cancelled", "client_gone")
    assert fields["completion_tokens"] < 2000


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/load_lora_adapter", "/v2/repository/index"])
def test_a_client_that_leaves_amid_its_body_leaves_no_traceback(server: Server, path: str) -> None:
    request_id = "amid-" + path.replace("/", "-")
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\r\nX-Request-Id: {request_id}\r\n"
        client.sendall((head + "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{").encode())
    line_of(server, request_id)
    assert not [line for line in server.log if "Traceback" in line]


def test_a_deadline(server: Server) -> None:
    body = {"model": "m", "prompt": "x", "max_tokens": 2000}
    headers = KEY | {"x-request-id": "late", "x-request-timeout": "0.2"}
    assert httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=60).status_code == 504
    assert tail(line_of(server, "late")) == ("/v1/completions", "504", "deadline", "deadline_exceeded")


def test_calls_over_grpc(server: Server) -> None:
    with triton.InferenceServerClient(server.grpc) as client:
        client.get_model_metadata("m", headers=KEY | {"x-request-id": "rpc-1"})
        with pytest.raises(InferenceServerException):
            client.get_model_metadata("none", headers=KEY | {"x-request-id": "rpc-2"})
        with pytest.raises(InferenceServerException):
            client.get_model_metadata("m", headers={"x-request-id": "rpc-3"})
    metadata = "/inference.GRPCInferenceService/ModelMetadata"
    assert tail(line_of(server, "rpc-1")) == (metadata, "OK", "ok", "")
    assert tail(line_of(server, "rpc-2")) == (metadata, "NOT_FOUND", "client_error", "model_not_found")
    assert tail(line_of(server, "rpc-3")) == (metadata, "UNAUTHENTICATED", "denied", "invalid_api_key")


def test_every_rpc_tells_its_id(server: Server) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        call: Any = channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")
        for metadata, status in (
            (KEY | {"x-request-id": "named"}, "OK"),
            ({"x-request-id": "named"}, "UNAUTHENTICATED"),
        ):
            rpc = call.future(b"", metadata=list(metadata.items()))
            assert (rpc.code().name, rpc.trailing_metadata()) == (status, (("x-request-id", "named"),))
        rpc = call.future(b"", metadata=list(KEY.items()))
        [(_, made)] = rpc.trailing_metadata()
        line_of(server, made)


def test_each_request_on_a_grpc_stream_has_a_line(server: Server) -> None:
    text = triton.InferInput("text_input", [1], np_to_triton_dtype(np.object_))
    text.set_data_from_numpy(np.array([b"some text"], dtype=np.object_))
    answers: list[Any] = []
    with triton.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.append((result, error)), headers=KEY)
        for _ in range(2):
            client.async_stream_infer("m", [text], parameters={"max_tokens": 3}, enable_empty_final_response=True)
        client.stop_stream()
    assert not [error for _, error in answers if error]
    route = "/inference.GRPCInferenceService/ModelStreamInfer/request"

    def lines() -> list[str]:
        return [line for line in server.log if f'"route":"{route}"' in line]

    wait_until(lambda: len(lines()) == 2)
    assert {(json.loads(line)["status"], json.loads(line)["completion_tokens"]) for line in lines()} == {("OK", 3)}


def seen(server: Server, **params: Any) -> httpx.Response:
    return httpx.get(server.operator + "/debug/requests", params=params, headers=KEY)


def test_metrics_and_requests_in_flight(server: Server) -> None:
    body = {"model": "m", "prompt": "x y z", "max_tokens": 2000, "stream": True}
    headers = KEY | {"x-request-id": "running", "x-request-timeout": "60"}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, headers=headers, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        shown = seen(server, limit=1).json()
        assert (shown["in_flight"], shown["chosen"]) == (1, 1)
        [request] = shown["requests"]
        assert (request["id"], request["stage"], request["model"]) == ("running", "decoding", "m")
        assert request["completion_tokens"] > 0
        assert 0 < request["deadline_in_seconds"] < 60
        page = httpx.get(server.operator + "/metrics").text
        assert 'penstock_front_requests_in_flight{protocol="http"} 2.0' in page  # the scrape is one
        assert seen(server, model="other").json()["requests"] == []
    none = seen(server, limit=0)
    assert (none.status_code, none.json()["error"]["param"]) == (400, "limit")
    wait_until(lambda: seen(server).json()["in_flight"] == 0)
    page = httpx.get(server.operator + "/metrics").text
    assert 'outcome="cancelled",protocol="http",route="/v1/completions",status="200"' in page
