"""What balancers, routers and endpoint pickers read of a running server."""

from __future__ import annotations

import base64
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import tritonclient.grpc as triton
import zmq

from penstock.gateway.configuration.config import load_config
from penstock.gateway.server.lifecycle import serve
from protocol.http2_client import Http2Client
from support.server import Server, free_port, serving, wait_until

COMPLETIONS = "/v1/completions"
BODY = {"model": "m", "prompt": [300 + n for n in range(40)], "max_tokens": 8}
FORMAT = "endpoint-load-metrics-format"


@pytest.fixture(scope="module")
def events() -> tuple[str, str]:
    return f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def server(events: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    adapter = tmp_path_factory.mktemp("adapter")
    (adapter / "adapter_config.json").write_text("{}")
    with serving(
        *("--engine", "simulated", "--served-model-name", "m", "--num-kv-blocks", "100", "--max-num-seqs", "4"),
        *("--load-reports", "json", "--vllm-metric-names", "--lora", f"tuned={adapter}"),
        *("--kv-events", events[0], "--kv-events-replay", events[1]),
    ) as running:
        yield running


def numbers(report: str) -> dict[str, float]:
    """Of a report as text."""
    parts = (part.split("=") for part in report.removeprefix("TEXT ").split(", "))
    return {name: float(value) for name, value in parts}


def test_every_inference_carries_a_report(server: Server) -> None:
    answer = server.post(COMPLETIONS, BODY)
    report = json.loads(answer.headers["endpoint-load-metrics"].removeprefix("JSON "))
    assert report["named_metrics"]["max_token_capacity"] == 1600
    with httpx.stream("POST", server.url + COMPLETIONS, json=BODY | {"stream": True}) as stream:
        assert stream.headers["endpoint-load-metrics"].startswith("JSON {")
        stream.read()
    refused = server.post(COMPLETIONS, BODY | {"temperature": -1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
    assert "endpoint-load-metrics" in refused.headers
    assert "endpoint-load-metrics" not in httpx.get(server.url + "/v1/models").headers


def test_a_request_chooses_the_form_and_the_rate_is_told(server: Server) -> None:
    def report() -> dict[str, float]:
        return numbers(server.post(COMPLETIONS, BODY, headers={FORMAT: "TEXT"}).headers["endpoint-load-metrics"])

    wait_until(lambda: report().get("rps_fractional", 0) > 0)
    found = report()
    assert found["named_metrics.num_requests_waiting"] == 0
    assert 0 <= found["named_metrics.kv_cache_utilization"] < 1


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_rpcs_carry_a_report_in_their_trailers(server: Server, method: str) -> None:
    """As gRPC's own balancers read it. The library keeps it for them, so this looks at the wire."""
    message = triton.service_pb2.ModelInferRequest(model_name="nothing").SerializeToString()
    framed = b"\0" + len(message).to_bytes(4, "big") + message
    grpc_fields = ((b"content-type", b"application/grpc"), (b"te", b"trailers"))
    with Http2Client(int(server.grpc.rpartition(":")[2])) as client:
        path = f"/inference.GRPCInferenceService/{method}"
        client.ask(path, 1, framed, *grpc_fields)
        report = client.answer(1).heads[-1]["endpoint-load-metrics-bin"]
        assert b"max_token_capacity" in base64.b64decode(report + "==")
        client.ask(path, 3, framed, *grpc_fields, (FORMAT.encode(), b"text"))
        assert client.answer(3).heads[-1]["endpoint-load-metrics"].startswith("TEXT ")


def test_endpoint_pickers_find_vllm_s_metrics(server: Server) -> None:
    text = httpx.get(server.url + "/metrics").text
    assert 'vllm:num_requests_waiting{engine="0",model_name="m"} 0.0' in text
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 0.0' in text
    assert re.search(r'vllm:kv_cache_usage_perc\{engine="0",model_name="m"\} 0\.', text)
    assert re.search(r'vllm:cache_config_info\{block_size="16",.*num_gpu_blocks="100"\} 1\.0', text)
    assert re.search(r'vllm:lora_requests_info\{.*running_lora_adapters="tuned",waiting_lora_adapters=""\} 1\.', text)
    assert 'penstock_kv_cache_block_size{model="m"} 16.0' in text
    assert 'running_lora_adapters="tuned"' in next(line for line in text.splitlines() if "penstock_lora_info{" in line)
    listed = {model.id: model.to_dict()["parent"] for model in server.client().models.list()}
    assert listed == {"m": None, "tuned": "m"}


def test_sglang_s_gateway_learns_the_model_and_its_requests_are_taken(server: Server) -> None:
    info = httpx.get(server.url + "/server_info").json()
    assert (info["served_model_name"], info["max_running_requests"], info["max_total_num_tokens"]) == ("m", 4, 1600)
    added = {"no_stop_trim": False, "return_hidden_states": False, "separate_reasoning": True, "stream_reasoning": True}
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 4, **added}
    assert server.post("/v1/chat/completions", chat).status_code == 200
    for name, value in added.items():
        refused = server.post("/v1/chat/completions", chat | {name: not value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_routers_learn_what_is_cached(server: Server, events: tuple[str, str]) -> None:
    prompt = [500 + n for n in range(40)]
    server.post(COMPLETIONS, BODY | {"prompt": prompt})
    context = zmq.Context()
    replay = context.socket(zmq.DEALER)
    replay.connect(events[1])
    stored: list[int] = []

    def is_stored() -> bool:
        replay.send_multipart((b"", bytes(8)))
        while True:
            assert replay.poll(20_000)
            _, topic, _, batch = replay.recv_multipart()
            if not batch:
                return prompt[:32] == stored[-48:][:32] or any(
                    stored[start : start + 32] == prompt[:32] for start in range(len(stored))
                )
            assert topic == f"kv@{socket.gethostname()}@m".encode()
            for event in msgspec.msgpack.decode(batch)[1]:
                stored.extend(event.get("token_ids", ()))

    try:
        wait_until(is_stored)
    finally:
        context.destroy(linger=0)


def test_models_of_a_repository_have_their_own_events(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"model_repository": [str(tmp_path)], "kv_events": "tcp://127.0.0.1:5557"}
    assert serve(load_config(settings, environ={})) == 1
    assert "kv-events: there is no MODEL" in caplog.text
