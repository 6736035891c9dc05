"""OpenTelemetry: real clients with a traceparent, a real server, and a collector that receives connected traces."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http

from support.server import Server, serving

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra [otel]")

from support.otlp import Collector, collecting, values

ROOT = Path(__file__).parents[2]
RPC = "inference.GRPCInferenceService/"
CALLER = "00f067aa0ba902b7"
OUTER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            inner = pb_utils.InferenceRequest(
                model_name="add_sub", requested_output_names=["OUTPUT0", "OUTPUT1"], inputs=request.inputs(),
                trace=request.trace())
            responses.append(pb_utils.InferenceResponse(inner.exec().output_tensors()))
        return responses
"""

TWO_STEPS = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }, { name: "INPUT1" data_type: TYPE_FP32 dims: [ 16 ] } ]
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
ensemble_scheduling {
  step [
    {
      model_name: "add_sub" model_version: -1
      input_map [ { key: "INPUT0" value: "INPUT0" }, { key: "INPUT1" value: "INPUT1" } ]
      output_map { key: "OUTPUT0" value: "sum" }
    },
    {
      model_name: "outer" model_version: -1
      input_map [ { key: "INPUT0" value: "sum" }, { key: "INPUT1" value: "INPUT1" } ]
      output_map { key: "OUTPUT0" value: "OUTPUT0" }
    }
  ]
}
"""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    for name in ("add_sub", "outer"):
        shutil.copytree(ROOT / "examples" / "model_repository" / "add_sub", repository / name)
    (repository / "outer" / "1" / "model.py").write_text(OUTER)
    config = repository / "outer" / "config.pbtxt"
    config.write_text(config.read_text().replace('"add_sub"', '"outer"'))
    (repository / "two_steps" / "1").mkdir(parents=True)
    (repository / "two_steps" / "config.pbtxt").write_text(TWO_STEPS)
    demo = ROOT / "gateway" / "penstock" / "gateway" / "demo_model"
    flags = (str(demo), "--engine", "simulated", "--sim-step-ms", "5", "--served-model-name", "m")
    environ = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test"}
    tracing = ("--otlp-endpoint", collector.url, "--otlp-sample", "0")
    with serving(*flags, "--model-repository", str(repository), *tracing, environ=environ) as running:
        running.wait_for_log(r"ready: \d models: .*outer 1")
        yield running


def traceparent(number: int, flags: str = "01") -> tuple[str, dict[str, str]]:
    """A trace's id, and the headers of a request of it."""
    trace_id = f"{number:032x}"
    return trace_id, {"traceparent": f"00-{trace_id}-{CALLER}-{flags}"}


def add_sub_inputs(module: Any) -> list[Any]:
    inputs = [module.InferInput(name, [1, 16], "FP32") for name in ("INPUT0", "INPUT1")]
    for each in inputs:
        each.set_data_from_numpy(np.ones((1, 16), np.float32))
    return inputs


def test_a_stream_of_the_openai_sdk(server: Server, collector: Collector) -> None:
    trace_id, headers = traceparent(1)
    stream = server.client().chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=5, stream=True, extra_headers=headers
    )
    assert [*stream][-1].choices[0].finish_reason == "length"
    root = "POST /v1/chat/completions"
    trace = collector.trace(trace_id, root)
    request = trace.one(root)
    assert request.parent_span_id.hex() == CALLER
    names = trace.children(root)
    assert names == ["receive", "template", "tokenize", "queue", "prefill", "decode"]
    assert trace.children("prefill") == ["prefill step"]
    assert len(trace.spans) == 2 + len(names)
    told = values(request.attributes)
    assert (told["http.response.status_code"], told["gen_ai.usage.output_tokens"]) == (200, 5)
    assert told["gen_ai.response.finish_reasons"].values[0].string_value == "length"
    decode = trace.one("decode")
    assert decode.end_time_unix_nano == request.end_time_unix_nano
    assert decode.start_time_unix_nano >= trace.one("prefill").end_time_unix_nano
    assert collector.paths == {"/v1/traces"}
    resource = collector.resources[0]
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("penstock", "test")


def test_a_stream_of_tritonclient(server: Server, collector: Collector) -> None:
    trace_id, headers = traceparent(2)
    text = triton.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"some text"], dtype=np.object_))
    answers: list[Any] = []
    with triton.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.append((result, error)), headers=headers)
        client.async_stream_infer("m", [text], parameters={"max_tokens": 3})
        client.stop_stream()
    assert not [error for _, error in answers if error]
    root, request = RPC + "ModelStreamInfer", RPC + "ModelStreamInfer/request"
    trace = collector.trace(trace_id, root)
    assert trace.one(root).parent_span_id.hex() == CALLER
    assert trace.children(root) == [request]
    assert trace.children(request) == ["receive", "tokenize", "queue", "prefill", "decode"]
    told = values(trace.one(request).attributes)
    assert (told["rpc.response.status_code"], told["gen_ai.usage.output_tokens"]) == ("OK", 3)


def test_a_classic_model(server: Server, collector: Collector) -> None:
    trace_id, headers = traceparent(3)
    with triton_http.InferenceServerClient(server.url.removeprefix("http://")) as client:
        client.infer("add_sub", add_sub_inputs(triton_http), headers=headers)
    root = "POST /v2/models/{model}/infer"
    trace = collector.trace(trace_id, root)
    assert trace.one(root).parent_span_id.hex() == CALLER
    assert trace.children(root) == ["receive", "infer add_sub"]


def test_a_model_that_calls_another(server: Server, collector: Collector) -> None:
    trace_id, headers = traceparent(4)
    with triton.InferenceServerClient(server.grpc) as client:
        client.infer("outer", add_sub_inputs(triton), headers=headers)
    trace = collector.trace(trace_id, RPC + "ModelInfer")
    assert trace.children(RPC + "ModelInfer") == ["receive", "infer outer"]
    assert trace.children("infer outer") == ["infer add_sub"]
    outer, inner = trace.one("infer outer"), trace.one("infer add_sub")
    assert outer.start_time_unix_nano < inner.start_time_unix_nano
    assert inner.end_time_unix_nano < outer.end_time_unix_nano


def test_the_steps_of_an_ensemble(server: Server, collector: Collector) -> None:
    trace_id, headers = traceparent(8)
    with triton.InferenceServerClient(server.grpc) as client:
        result = client.infer("two_steps", add_sub_inputs(triton), headers=headers)
    assert (result.as_numpy("OUTPUT0") == 3).all()
    trace = collector.trace(trace_id, RPC + "ModelInfer")
    assert trace.children("infer two_steps") == ["infer add_sub", "infer outer", "infer add_sub"]


def test_a_failed_request_says_why(server: Server, collector: Collector) -> None:
    trace_id, headers = traceparent(5)
    body = {"model": "none", "prompt": "x"}
    assert httpx.post(server.url + "/v1/completions", json=body, headers=headers).status_code == 404
    told = values(collector.trace(trace_id, "POST /v1/completions").one("POST /v1/completions").attributes)
    assert (told["http.response.status_code"], told["error.type"]) == (404, "model_not_found")


def test_the_last_spans_are_sent_at_the_end_of_the_server(collector: Collector) -> None:
    environ = {"OTEL_BSP_SCHEDULE_DELAY": "600000"}
    flags = ("--engine", "simulated", "--otlp-endpoint", collector.url + "/v1/traces")
    with serving(*flags, environ=environ) as server:
        for number, flag in ((6, "00"), (7, "01")):
            _, headers = traceparent(number, flag)
            assert httpx.get(server.url + "/v1/models", headers=headers).status_code == 200
        assert server.stop() == 0
    assert len(collector.trace(traceparent(7)[0], "GET /v1/models").spans) == 1
    assert collector.spans(traceparent(6)[0]) == []  # its caller is not sampled


def test_a_collector_that_is_away_harms_nobody() -> None:
    flags = ("--engine", "simulated", "--otlp-endpoint", "http://127.0.0.1:9")
    environ = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_EXPORTER_OTLP_TIMEOUT": "0.3"}
    with serving(*flags, environ=environ) as server:
        assert httpx.get(server.url + "/v1/models").status_code == 200
        server.wait_for_log("Failed to export")
        assert httpx.get(server.url + "/v1/models").status_code == 200
        assert server.stop() == 0
