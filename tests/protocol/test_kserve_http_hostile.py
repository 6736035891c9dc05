"""Requests that have broken other servers: each is refused with 4xx, and the server lives on."""

from __future__ import annotations

import gzip
import json
import resource
import socket
import struct
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

import pytest

from support.kserve import FakeModelStore, add_sub, identity
from support.kserve_http import KServeServer

INFER = "/v2/models/add_sub/infer"
LIMIT = 8 << 20
FLOATS = [float(value) for value in range(16)]


@pytest.fixture(scope="module")
def server() -> Iterator[KServeServer]:
    store = FakeModelStore(add_sub(), identity("FP32"), identity("BYTES"))
    with KServeServer(store, max_input_bytes=LIMIT, allow_shared_memory=True) as server:
        yield server


@pytest.fixture(autouse=True)
def still_alive(server: KServeServer) -> Iterator[None]:
    yield
    answer = server.post(INFER, GOOD)
    assert (answer.status, answer.json()["outputs"][0]["data"][15]) == (200, 30.0)


def json_input(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "shape": [16], "datatype": "FP32", "data": FLOATS} | fields


GOOD = {"inputs": [json_input("INPUT0"), json_input("INPUT1")]}
BINARY = {
    "inputs": [
        {"name": f"INPUT{i}", "shape": [16], "datatype": "FP32", "parameters": {"binary_data_size": 64}} for i in (0, 1)
    ]
}
HEAD = json.dumps(BINARY).encode()
TAIL = bytes(128)


def raw(server: KServeServer, *headers: bytes, body: bytes = HEAD + TAIL) -> tuple[int, str]:
    """The status of the answer to exactly these header lines, and its error."""
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        lines = [
            b"POST " + INFER.encode() + b" HTTP/1.1",
            b"host: localhost",
            b"content-length: %d" % len(body),
            *headers,
        ]
        connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        answer = HTTPResponse(connection)
        answer.begin()
        return answer.status, str(json.loads(answer.read()).get("error", ""))


NO_NUMBER = "Inference-Header-Content-Length is not a number"
NO_ROOM = "inference header size should be in range"


@pytest.mark.parametrize(
    ("value", "error"),
    [
        *((value, NO_NUMBER) for value in (b"-1", b"1e3", b"+5", b"0x10", b"5 5", b"", b"9" * 400)),
        *((value, NO_ROOM) for value in (b"99999999999", b"%d" % (len(HEAD + TAIL) + 1))),
        (b"1", "The request body is not valid JSON"),
    ],
)
def test_header_lengths_that_lie(server: KServeServer, value: bytes, error: str) -> None:
    status, message = raw(server, b"inference-header-content-length: " + value)
    assert status == 400
    assert message.startswith(error)


def test_header_lengths_that_are_right_but_for_blanks(server: KServeServer) -> None:
    assert raw(server, b"inference-header-content-length:  %d " % len(HEAD)) == (200, "")


def test_duplicated_header_lengths(server: KServeServer) -> None:
    line = b"inference-header-content-length: %d" % len(HEAD)
    assert raw(server, line) == (200, "")
    assert raw(server, line, line) == (400, "Inference-Header-Content-Length is given more than once.")


def test_duplicated_and_bad_content_lengths(server: KServeServer) -> None:
    for line in (b"content-length: 5", b"content-length: -5"):
        status, error = raw(server, line)
        assert (status, "Invalid HTTP request." in error) == (400, True), error


@pytest.mark.parametrize(
    "fields",
    [
        {"shape": [16, 2**60 + 2]},
        {"shape": [4, 2**60 + 2]},
        {"shape": [2, -5]},
        {"shape": [-1, -16]},
        {"shape": [2**63]},
        {"shape": [2**64]},
        {"shape": [10**30]},
        {"shape": [0, 2**39, 2**39]},
        {"shape": [1] * 1000 + [16]},
        {"shape": [16.0]},
        {"shape": [True]},
        {"shape": None},
        {"shape": [[16]]},
        {"data": [1] * 15},
        {"data": [1] * 17},
        {"data": None},
        {"data": "AAAA"},
        {"data": {"0": 1}},
        {"data": [1e39] * 16},
        {"data": [{}] * 16},
        {"datatype": "FP32 "},
        {"datatype": "x" * 100_000},
        {"datatype": 5},
        {"name": ""},
        {"name": "x" * 100_000},
        {"name": "INPUT1"},
        {"parameters": []},
        {"parameters": {"binary_data_size": 64}},
        {"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 64}},
    ],
)
def test_hostile_json_inputs(server: KServeServer, fields: dict[str, Any]) -> None:
    answer = server.post(INFER, {"inputs": [json_input("INPUT0") | fields, json_input("INPUT1")]})
    assert answer.status in (400, 404)
    assert len(answer.error) < 4096


@pytest.mark.parametrize(
    "parameters",
    [
        {"binary_data_size": -64},
        {"binary_data_size": 2**64},
        {"binary_data_size": 10**30},
        {"binary_data_size": 64.5},
        {"binary_data_size": "64"},
        {"shared_memory_region": "../../etc/passwd", "shared_memory_byte_size": 64},
        {"shared_memory_region": "r", "shared_memory_byte_size": 2**64 - 32, "shared_memory_offset": 2**64 - 32},
        {"shared_memory_region": "r", "shared_memory_byte_size": -1},
    ],
)
def test_hostile_input_parameters(server: KServeServer, parameters: dict[str, Any]) -> None:
    given = json_input("INPUT0", parameters=parameters)
    del given["data"]
    head = json.dumps({"inputs": [given, json_input("INPUT1")]}).encode()
    answer = server.post(INFER, head + bytes(64), {"Inference-Header-Content-Length": str(len(head))})
    assert answer.status in (400, 404)
    assert len(answer.error) < 4096


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (struct.pack("<I", 2**32 - 1), "expecting string of length 4294967295 but only 0 bytes available"),
        (struct.pack("<I", 5) + b"abcd", "expecting string of length 5 but only 4 bytes available"),
        (struct.pack("<I", 3) + b"abcd", "unexpected number of string elements 2"),
        (b"\0\0", "incomplete string length indicator"),
        (b"", "unexpected number of string elements 0"),
        (bytes(8), "unexpected number of string elements 2"),
    ],
)
def test_strings_with_lengths_that_lie(server: KServeServer, data: bytes, error: str) -> None:
    given = json_input("INPUT0", shape=[1], datatype="BYTES", parameters={"binary_data_size": len(data)})
    del given["data"]
    head = json.dumps({"inputs": [given]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = server.post("/v2/models/identity_bytes/infer", head + data, headers)
    assert answer.status == 400
    assert error in answer.error


def test_a_million_empty_strings_are_fine(server: KServeServer) -> None:
    count = 1_000_000
    given = json_input("INPUT0", shape=[count], datatype="BYTES", parameters={"binary_data_size": 4 * count})
    del given["data"]
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = server.post("/v2/models/identity_bytes/infer", head + bytes(4 * count), headers)
    assert answer.status == 200
    assert answer.body.endswith(bytes(4 * count))


@pytest.mark.parametrize("depth", [101, 120, 250_000])
@pytest.mark.parametrize("place", ["data", "parameters", "unknown"])
def test_deep_json(server: KServeServer, depth: int, place: str) -> None:
    deep = b"[" * depth + b"1" + b"]" * depth
    bodies = {
        "data": b'{"inputs":[{"name":"INPUT0","shape":[1],"datatype":"FP32","data":%b}]}',
        "parameters": b'{"inputs":[],"parameters":{"a":%b}}',
        "unknown": b'{"inputs":[],"a":%b}',
    }
    for body in (bodies[place] % deep, bodies[place] % deep[:depth]):
        answer = server.post(INFER, body)
        assert (answer.status, answer.error) == (400, "The request body nests deeper than 100 levels.")


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"sequence_id": -1}, "'sequence_id' must be an unsigned 64-bit integer"),
        ({"sequence_id": "x" * 129}, "string correlation ID cannot be longer than 128 characters"),
        ({"sequence_start": "yes"}, "'sequence_start' must be a boolean"),
        ({"priority": 2**64}, "'priority' must be an unsigned 64-bit integer"),
        ({"timeout": -1}, "'timeout' must be an unsigned 64-bit integer"),
        ({"headers": {}}, "'headers' is reserved"),
        ({"triton_x": 1}, "starting with 'triton_' are reserved"),
        ({"binary_data_output": "true"}, "'binary_data_output' must be a boolean"),
        ({"mine": []}, "'mine' must be a boolean, a number or a string"),
        ({"x" * 100_000: None}, "xx' must be a boolean, a number or a string"),
    ],
)
def test_hostile_parameters(server: KServeServer, parameters: dict[str, Any], error: str) -> None:
    answer = server.post(INFER, GOOD | {"parameters": parameters})
    assert answer.status == 400
    assert error in answer.error
    assert len(answer.error) < 4096


def test_duplicate_names(server: KServeServer) -> None:
    answer = server.post(INFER, {"inputs": [json_input("INPUT0"), json_input("INPUT0"), json_input("INPUT1")]})
    assert (answer.status, answer.error) == (400, "input 'INPUT0' already exists in request")
    answer = server.post(INFER, GOOD | {"outputs": [{"name": "OUTPUT0"}, {"name": "OUTPUT0"}]})
    assert (answer.status, answer.error) == (400, "output 'OUTPUT0' is requested more than once")


def test_a_compression_bomb(server: KServeServer) -> None:
    bomb = gzip.compress(bytes(512 << 20), 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(5):
        answer = server.post(INFER, bomb, {"Content-Encoding": "gzip"})
        assert answer.status == 413
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < 8 * LIMIT


def test_long_text_of_small_numbers_against_a_lying_shape(server: KServeServer) -> None:
    """Text that would take four times its size as FP32 is refused by its count, before a number of it is read."""
    text = b"[" + b"1," * (LIMIT // 2 - 200) + b"1]"
    body = b'{"inputs":[{"name":"INPUT0","shape":[16],"datatype":"FP32","data":%b}]}' % text
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = server.post("/v2/models/identity_fp32/infer", body)
    assert answer.status == 400
    assert "Shape does not match true shape" in answer.error
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < 8 * LIMIT


def test_long_text_of_small_numbers(server: KServeServer) -> None:
    count = LIMIT // 2 - 200
    text = b"[" + b"1," * (count - 1) + b"1]"
    given = b'{"name":"INPUT0","shape":[%d],"datatype":"FP32","data":%b}' % (count, text)
    body = b'{"inputs":[%b],"parameters":{"binary_data_output":true}}' % given
    assert server.post("/v2/models/identity_fp32/infer", body).status == 200


def test_bodies_over_the_limit(server: KServeServer) -> None:
    assert server.post(INFER, bytes(LIMIT + 1)).status == 413
    answer = server.post(INFER, bytes(LIMIT))
    assert answer.status == 400
    assert "is not valid JSON" in answer.error


@pytest.mark.parametrize(
    "name",
    ["..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "%00", "a%0d%0aset-cookie:x", "%ff", "%", "x" * 5000, "%E2%80%AE"],
)
def test_hostile_names(server: KServeServer, name: str) -> None:
    for path in (f"/v2/models/{name}", f"/v2/models/{name}/infer", f"/v2/models/add_sub/versions/{name}/infer"):
        answer = server.post(path, GOOD)
        assert answer.status in (404, 405)
        assert len(answer.error) < 4096
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("version", ["0", "00", "-1", "99999999999999999999", "1.0", "%31%30"])
def test_hostile_versions(server: KServeServer, version: str) -> None:
    assert server.post(f"/v2/models/add_sub/versions/{version}/infer", GOOD).status in (400, 404)
