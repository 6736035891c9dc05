"""What a server without keys gives to web pages and other machines, and what it still gives to everybody else."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import tritonclient.http as triton

from penstock.gateway.models.language.models import find_model
from support.server import Server, refusal, serving, wait_until

SIMULATED = ("--engine", "simulated", "--served-model-name", "m")
COMPLETION = {"model": "m", "prompt": [300, 301], "max_tokens": 2}
PAGE = "http://localhost:3000"
CROSS_SITE = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
CODE = """
from pathlib import Path
Path({mark!r}).touch()

class TritonPythonModel:
    def execute(self, requests):
        return [None for _ in requests]
"""


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As it comes, with models that clients may load."""
    repository = str(tmp_path_factory.mktemp("models"))
    model = str(find_model(None).folder)
    with serving(model, *SIMULATED, "--model-repository", repository, "--model-control-mode", "explicit") as server:
        yield server


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    """For a trusted network, with a page of its own."""
    names = ("--allowed-hosts", "gpu-box", "--allowed-origins", PAGE)
    with serving(*SIMULATED, "--host", "0.0.0.0", "--allow-anonymous", *names) as server:
        yield server


def load_of_code(mark: Path) -> str:
    """The body of a request to load a model whose code leaves this mark."""
    tensor = {"name": "X", "data_type": "TYPE_FP32", "dims": [1]}
    config = {"backend": "python", "input": [tensor], "output": [tensor | {"name": "Y"}]}
    code = base64.b64encode(CODE.format(mark=str(mark)).encode()).decode()
    return json.dumps({"parameters": {"config": json.dumps(config), "file:1/model.py": code}})


def test_a_web_page_cannot_load_code_and_its_user_can(laptop: Server, tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    url = laptop.url + "/v2/repository/models/x/load"
    attack = httpx.post(url, content=load_of_code(mark), headers={**CROSS_SITE, "Content-Type": "text/plain"})
    assert attack.status_code == 403
    assert "--allowed-origins" in attack.json()["error"]
    assert [model["name"] for model in httpx.post(laptop.url + "/v2/repository/index").json()] == ["m"]
    assert not mark.exists()
    curl = ["curl", "-sS", "-o", "-", "-w", "%{http_code}", "-d", load_of_code(mark), url]
    assert subprocess.run(curl, capture_output=True, text=True, timeout=60, check=True).stdout == "200"
    assert mark.exists()


@pytest.mark.parametrize("port", ["main", "metrics"])
def test_a_page_that_renamed_itself_reads_nothing(laptop: Server, port: str) -> None:
    """DNS rebinding: for the browser it is same-origin, so only the name tells."""
    own = {"Origin": "http://evil.example:8000", "Sec-Fetch-Site": "same-origin", "Host": "evil.example:8000"}
    paths = ("/v1/models", "/v2", "/metrics", "/version") if port == "main" else ("/metrics", "/debug/scheduler")
    for path in paths:
        answer = httpx.get((laptop.url if port == "main" else laptop.operator) + path, headers=own)
        assert answer.status_code == 403, path
        assert "--allowed-hosts" in answer.text
    if port == "main":
        assert laptop.post("/v1/completions", COMPLETION, headers=own).json()["error"]["code"] == "host_not_allowed"


def test_a_kubelet_asks_for_health_under_a_pod_s_address(laptop: Server) -> None:
    for url in (laptop.url, laptop.operator):
        for path in ("/health", "/health/live", "/health/ready"):
            assert httpx.get(url + path, headers={"Host": "10.42.0.7:8000"}).status_code == 200
    for path in ("/v2/health/live", "/v2/health/ready"):
        assert httpx.get(laptop.url + path, headers={"Host": "10.42.0.7:8000"}).status_code == 200


def test_clients_of_every_kind_need_no_header(laptop: Server) -> None:
    by_name = laptop.url.replace("127.0.0.1", "localhost")
    assert laptop.client().completions.create(**COMPLETION).choices
    assert httpx.post(by_name + "/v1/completions", content=json.dumps(COMPLETION)).status_code == 200
    for url in (laptop.url, by_name):
        client = triton.InferenceServerClient(url.removeprefix("http://"))
        assert client.is_model_ready("m")
        assert client.get_log_settings()["log_verbose_level"] == 0
        client.update_log_settings({"log_verbose_level": 0})
        client.close()
    curl = ["curl", "-sS", "-d", '{"text_input": "a", "max_tokens": 2}', laptop.url + "/v2/models/m/generate"]
    assert "text_output" in subprocess.run(curl, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_page_of_another_origin_learns_nothing_of_a_preflight(laptop: Server) -> None:
    answer = httpx.options(
        laptop.url + "/v1/completions", headers={"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    )
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_an_allowed_page_streams(shared: Server) -> None:
    asks = {
        "Origin": PAGE,
        "Sec-Fetch-Site": "cross-site",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }
    preflight = httpx.options(shared.url + "/v1/completions", headers=asks)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
    sends = {"Origin": PAGE, "Sec-Fetch-Site": "cross-site"}
    answer = shared.post("/v1/completions", COMPLETION | {"stream": True}, headers=sends)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["vary"] == "origin"
    assert shared.post("/v1/completions", COMPLETION, headers=CROSS_SITE).status_code == 403


def test_a_shared_server_answers_to_addresses_and_its_names(shared: Server) -> None:
    for url in (shared.url + "/v1/models", shared.operator + "/metrics"):
        for host, status in (("192.0.2.7:8000", 200), ("gpu-box:8000", 200), ("localhost", 200), ("evil.example", 403)):
            assert httpx.get(url, headers={"Host": host}).status_code == status, host


def test_metrics_that_other_machines_reach_need_the_key() -> None:
    with serving(*SIMULATED, "--host", "0.0.0.0", "--admin-key", "secret", "--allowed-origins", "*") as server:
        for path in ("/metrics", "/debug/scheduler"):
            assert httpx.get(server.operator + path).status_code == 401
            key = {"Authorization": "Bearer secret", "Host": "prometheus.example"}
            assert httpx.get(server.operator + path, headers=key).status_code == 200
        assert httpx.get(server.operator + "/health").status_code == 200
        page = {"Origin": "http://any.example", "Sec-Fetch-Site": "cross-site", "Authorization": "Bearer secret"}
        answer = server.post("/v1/completions", COMPLETION, headers=page)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
        several = [("Authorization", "Bearer secret"), ("Authorization", "Bearer other")]
        refused = httpx.get(server.url + "/v1/models", headers=several)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "Authorization is given more than once."
        assert_grpc_takes_one_authorization(server)


def assert_grpc_takes_one_authorization(server: Server) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        call: Any = channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")
        wait_until(lambda: bool(call(b"", metadata=[("authorization", "Bearer secret")])))
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", metadata=[("authorization", "Bearer secret"), ("authorization", "Bearer other")])
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("flags", "port"),
    [
        (("--host", "0.0.0.0"), "HTTP"),
        (("--grpc-address", "::"), "gRPC"),
        (("--metrics-address", "0.0.0.0"), "metrics"),
    ],
)
def test_a_port_for_other_machines_needs_a_key_or_the_flag(
    flags: tuple[str, ...], port: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = refusal(caplog, *SIMULATED, *flags)
    assert f"{port} on {flags[1]}" in said
    assert "--api-key" in said
    assert "--allow-anonymous" in said
