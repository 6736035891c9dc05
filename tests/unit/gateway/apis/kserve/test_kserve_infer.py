"""POST /v2/models/{model}/infer from its headers to its answer."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.apis.kserve import http_infer
from penstock.gateway.apis.kserve.parameters import forward_pattern
from penstock.gateway.apis.kserve.trace_settings import TraceSettings
from penstock.gateway.apis.kserve.tracing import Tracing
from protocol.asgi_client import AsgiCall
from support.kserve import identity, repeat
from support.kserve_http import KServeFront, error_of

FLOATS = [float(value) for value in range(16)]
GOOD = {"inputs": [{"name": f"INPUT{i}", "shape": [16], "datatype": "FP32", "data": FLOATS} for i in (0, 1)]}
INFER = "/v2/models/add_sub/infer"


@pytest.fixture
def front() -> KServeFront:
    return KServeFront()


async def test_an_answer_names_its_request_model_and_version(front: KServeFront) -> None:
    answer = await front("POST", INFER, GOOD | {"id": "7"})
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    found = answer.json()
    assert (found["id"], found["model_name"], found["model_version"]) == ("7", "add_sub", "1")
    assert found["outputs"][0]["data"] == [2 * value for value in FLOATS]
    assert (await front("POST", "/v2/models/add_sub/versions/1/infer", GOOD)).status == 200


async def test_parameters_of_the_response(front: KServeFront) -> None:
    front.store.model("add_sub").response_parameters = {"a": 1}
    assert (await front("POST", INFER, GOOD)).json()["parameters"] == {"a": 1}


@pytest.mark.parametrize("kind", ["application/json", "application/octet-stream", "text/plain", ""])
async def test_any_content_type_will_do(front: KServeFront, kind: str) -> None:
    assert (await front("POST", INFER, GOOD, content_type=kind)).status == 200


async def test_decoupled_models_are_for_streams() -> None:
    answer = await KServeFront(repeat())("POST", "/v2/models/repeat/infer", b"not even JSON")
    assert answer.status == 501
    assert error_of(answer) == "HTTP end point doesn't support models with decoupled transaction policy"


@pytest.mark.parametrize("value", ["-1", "1e3", "+5", "5 5", "0x10", "", "5,5", "٣", "9" * 5000, "1_0"])
async def test_header_lengths_that_are_none(front: KServeFront, value: str) -> None:
    answer = await front("POST", INFER, GOOD, inference_header_content_length=value)
    assert (answer.status, error_of(answer)) == (400, "Inference-Header-Content-Length is not a number")


async def test_a_header_length_may_be_given_once(front: KServeFront) -> None:
    body = json.dumps(GOOD).encode()
    request = AsgiCall(front.app, INFER, body)
    length = (b"inference-header-content-length", b"%d" % len(body))
    request._scope["headers"] += [length, length]
    answer = await request.run()
    assert (answer.status, error_of(answer)) == (400, "Inference-Header-Content-Length is given more than once.")


async def test_binary_answers_come_with_the_length_of_their_head(front: KServeFront) -> None:
    answer = await front("POST", INFER, GOOD | {"parameters": {"binary_data_output": True}})
    assert answer.headers["content-type"] == "application/octet-stream"
    length = int(answer.headers["inference-header-content-length"])
    body = b"".join(answer.bodies)
    assert json.loads(body[:length])["outputs"][1]["parameters"] == {"binary_data_size": 64}
    assert len(body) == length + 128 == int(answer.headers["content-length"])


async def test_long_binary_answers_leave_in_pieces() -> None:
    front = KServeFront(identity("FP32"))
    count = 200_000
    head = {
        "inputs": [
            {"name": "INPUT0", "shape": [count], "datatype": "FP32", "parameters": {"binary_data_size": 4 * count}}
        ],
        "parameters": {"binary_data_output": True},
    }
    data = json.dumps(head).encode()
    tail = bytes(range(256)) * (4 * count // 256)
    answer = await front(
        "POST", "/v2/models/identity_fp32/infer", data + tail, inference_header_content_length=str(len(data))
    )
    assert answer.complete
    assert len(answer.bodies) == 2
    assert answer.bodies[1] == tail
    assert int(answer.headers["content-length"]) == sum(map(len, answer.bodies))


async def test_compressed_requests_and_answers() -> None:
    front = KServeFront(identity("BYTES"))
    path = "/v2/models/identity_bytes/infer"
    text = "tensor" * 1000
    body = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1], "datatype": "BYTES", "data": [text]}]}).encode()
    answer = await front("POST", path, gzip.compress(body), content_encoding="gzip", accept_encoding="deflate")
    assert answer.headers["content-encoding"] == "deflate"
    assert json.loads(zlib.decompress(b"".join(answer.bodies)))["outputs"][0]["data"] == [text]
    answer = await front("POST", path, zlib.compress(body), content_encoding="deflate", accept_encoding="gzip")
    assert json.loads(gzip.decompress(b"".join(answer.bodies)))["outputs"][0]["data"] == [text]
    assert "content-encoding" not in (await front("POST", path, body)).headers


async def test_short_answers_are_compressed_as_well_where_the_client_asks(front: KServeFront) -> None:
    plain = await front("POST", INFER, GOOD)
    packed = await front("POST", INFER, GOOD, accept_encoding="gzip")
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(b"".join(packed.bodies)) == b"".join(plain.bodies)


async def test_unknown_encodings(front: KServeFront) -> None:
    answer = await front("POST", INFER, GOOD, content_encoding="br")
    assert (answer.status, answer.headers["accept-encoding"]) == (415, "gzip, deflate")


async def test_decompressed_bodies_have_the_same_limit() -> None:
    front = KServeFront(max_input_bytes=10_000)
    answer = await front("POST", INFER, gzip.compress(bytes(10_001)), content_encoding="gzip")
    assert answer.status == 413
    assert answer.json()["error"].endswith("larger than 10000 bytes. --http-max-input-size sets the limit.")
    answer = await front("POST", INFER, bytes(10_001))  # report server#1776: which of the limits it was
    assert answer.json() == {
        "error": "The request body is larger than 10000 bytes. --http-max-input-size sets the limit."
    }


async def test_classes_have_the_labels_of_the_model_s_file(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    front = KServeFront(identity("FP32", [2], output_extra='label_filename: "labels.txt"', folder=tmp_path))
    answer = await front(
        "POST",
        "/v2/models/identity_fp32/infer",
        {
            "inputs": [{"name": "INPUT0", "shape": [2], "datatype": "FP32", "data": [0.5, 0.25]}],
            "outputs": [{"name": "OUTPUT0", "parameters": {"classification": 2}}],
        },
    )
    assert answer.json()["outputs"][0]["data"] == ["0.500000:0:cat", "0.250000:1:dog"]


async def test_headers_reach_the_model() -> None:
    front = KServeFront(header_forward_pattern=forward_pattern("x-mine-.*"))
    await front("POST", INFER, GOOD, x_mine_a="1", x_other="2", x_request_timeout="30")
    request = front.store.model("add_sub").requests[0]
    assert request.parameters == {"x-mine-a": "1"}
    assert request.deadline is not None


async def test_a_bad_timeout_is_refused(front: KServeFront) -> None:
    answer = await front("POST", INFER, GOOD, x_request_timeout="soon")
    assert (answer.status, error_of(answer)) == (400, "X-Request-Timeout must be a number of seconds above 0.")


async def test_traced_requests(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    settings = TraceSettings(trace_level=("TIMESTAMPS", "TENSORS"), trace_rate=1, trace_count=-1, log_frequency=0)
    tracing = Tracing(str(file), settings)
    front = KServeFront(tracing=tracing)
    assert (await front("POST", INFER, GOOD)).status == 200
    assert front.store.model("add_sub").requests[0].trace is not None
    tracing.close()
    written = file.read_text()
    for event in ("HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END", "OUTPUT0"):
        assert event in written


async def test_a_client_that_leaves_cancels_its_request(front: KServeFront) -> None:
    model = front.store.model("add_sub")
    model.gate = asyncio.Event()
    request = AsgiCall(front.app, INFER, GOOD)
    running = asyncio.create_task(request.run())
    await model.waiting.wait()
    request.disconnect()
    await asyncio.wait_for(running, 10)
    assert model.cancelled.is_set()
    assert request.messages == []
    assert front.settings.drain.in_flight == 0


async def test_a_drain_that_ends_interrupts(front: KServeFront) -> None:
    model = front.store.model("add_sub")
    model.gate = asyncio.Event()
    request = AsgiCall(front.app, INFER, GOOD)
    running = asyncio.create_task(request.run())
    await model.waiting.wait()
    front.settings.drain.expire()
    await running
    assert (request.status, model.cancelled.is_set()) == (503, True)


@pytest.mark.parametrize("count", [1, 20_000])
async def test_long_requests_hold_up_nobody(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many strings behind a short head are read in a thread, few are not."""
    front = KServeFront(identity("BYTES"))
    threads: list[Any] = []
    monkeypatch.setattr(http_infer, "parse_infer", partial(_noting_thread, threads, http_infer.parse_infer))
    given = {"name": "INPUT0", "shape": [count], "datatype": "BYTES", "parameters": {"binary_data_size": 4 * count}}
    head = json.dumps({"inputs": [given]}).encode()
    path = "/v2/models/identity_bytes/infer"
    answer = await front("POST", path, head + bytes(4 * count), inference_header_content_length=str(len(head)))
    assert answer.json()["outputs"][0]["data"] == [""] * count
    assert (threads == [threading.main_thread()]) == (count == 1)


def _noting_thread(threads: list[Any], function: Any, *args: Any) -> Any:
    threads.append(threading.current_thread())
    return function(*args)
