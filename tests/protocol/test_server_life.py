"""The life of a server process: readiness, drain, overload, deadlines, disconnects, and the death of its engine."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from protocol.raw_http import connect, post
from support.server import Server, refusal, serving, wait_until

SIMULATED = ("--engine", "simulated", "--served-model-name", "m")
SLOW = (*SIMULATED, "--sim-step-ms", "20")
COMPLETIONS = "/v1/completions"


def body(max_tokens: int = 8, **more: object) -> dict[str, object]:
    return {"model": "m", "prompt": [[300, 301, 302]], "max_tokens": max_tokens, **more}


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    """A server for tests that leave it idle and ready."""
    with serving(*SLOW) as server:
        yield server


@pytest.fixture(scope="module")
def watched() -> Iterator[Server]:
    """A server that replaces an engine whose step takes longer than 2 s, five times at most: each test here that makes
    it do so counts. A step with token 1000 never ends."""
    with serving(*SLOW, "--watchdog-timeout", "2", "--sim-faults", "stall=1000") as server:
        yield server


@pytest.fixture(scope="module")
def with_keys() -> Iterator[Server]:
    with serving(*SIMULATED, environ={"PENSTOCK_API_KEY": "right,other"}) as server:
        yield server


def assert_idle(server: Server) -> None:
    """Conservation: nothing runs, nothing waits, every block is free, and all that came has ended."""
    wait_until(lambda: server.is_idle() and not server.state()["num_waiting"])
    state = server.state()
    assert state["admitted"] == sum(state["finished"].values())


def assert_recovers(server: Server) -> None:
    server.wait_ready()
    assert server.post(COMPLETIONS, body()).status_code == 200
    assert_idle(server)


def test_readiness_tells_the_truth_while_loading():
    server = Server(*SIMULATED)
    try:
        assert httpx.get(server.url + "/health/live").status_code == 200
        seen = {httpx.get(server.url + "/health/ready").status_code}
        server.wait_ready()
        seen.add(httpx.get(server.url + "/health/ready").status_code)
        assert seen <= {200, 503}
        assert 200 in seen
    finally:
        server.close()


def test_sigterm_drains():
    with serving(*SLOW) as server, server.stream(COMPLETIONS, body(150)) as events:
        next(events)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(server.url + "/health/ready").status_code == 503)
        refused = server.post(COMPLETIONS, body())
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["message"]
        rest = list(events)
        assert rest[-1] == "[DONE]"
        assert rest[-2]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(30) == 0


def test_grpc_clients_that_know_two_servers_lose_no_call_when_one_drains():
    """They go elsewhere where they get no connection, and take the failure of a call for its answer."""
    with serving(*SLOW) as leaving, serving(*SLOW) as staying, leaving.stream(COMPLETIONS, body(100)) as events:
        next(events)
        turns = [("grpc.lb_policy_name", "round_robin")]
        with grpc.insecure_channel(f"ipv4:{leaving.grpc},{staying.grpc}", turns) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for _ in range(20):
                stub.ServerMetadata(service_pb2.ServerMetadataRequest(), timeout=30)
            leaving.process.send_signal(signal.SIGTERM)
            while leaving.process.poll() is None:
                stub.ServerMetadata(service_pb2.ServerMetadataRequest(), timeout=30)
        assert list(events)[-1] == "[DONE]"


def test_what_outlives_the_drain_ends_with_an_error_event():
    with serving(*SLOW, "--drain-timeout", "0.5") as server, server.stream(COMPLETIONS, body(5000)) as events:
        next(events)
        server.process.send_signal(signal.SIGTERM)
        rest = list(events)
        assert rest[-1] == "[DONE]"
        assert "error" in rest[-2]
        assert server.process.wait(30) == 0


def test_before_it_drains_a_server_that_is_not_ready_still_serves():
    """Until balancers have noticed."""
    with serving(*SLOW, "--drain-delay", "600") as server, grpc.insecure_channel(server.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        client = httpx.Client()
        assert "connection" not in client.get(server.url + "/health/ready").headers
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get(server.url + "/health/ready").status_code == 503)
        assert client.get(server.url + "/v2/health/ready").status_code == 400
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert client.get(server.url + "/health/live").status_code == 200
        served = client.post(server.url + COMPLETIONS, json=body())
        assert served.status_code == 200
        assert served.headers["connection"] == "close"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0


def test_a_delay_ends_by_itself():
    with serving(*SIMULATED, "--drain-delay", "0.2") as server:
        assert server.stop() == 0
        server.wait_for_log("new requests are still served for 0.2 s")


def test_a_second_signal_does_not_wait():
    with serving(*SLOW, "--drain-timeout", "600") as server, server.stream(COMPLETIONS, body(5000)) as events:
        next(events)
        server.process.send_signal(signal.SIGINT)
        server.wait_for_log("draining 1 requests")
        server.process.send_signal(signal.SIGINT)
        assert "error" in list(events)[-2]
        assert server.process.wait(30) == 0


def test_kill_9_of_the_engine_ends_streams_and_the_server_recovers(shared):
    with shared.stream(COMPLETIONS, body(5000)) as events:
        next(events)
        os.kill(shared.engine_pid(), signal.SIGKILL)
        rest = list(events)
    assert rest[-1] == "[DONE]"
    assert rest[-2]["error"]["message"]
    assert_recovers(shared)


def test_a_hung_engine_is_noticed_and_replaced(watched):
    with watched.stream(COMPLETIONS, body(5000)) as events:
        next(events)
        os.kill(watched.engine_pid(), signal.SIGSTOP)
        assert "error" in list(events)[-2]
    assert_recovers(watched)


def test_a_stalled_step_ends_its_request_with_one_error_and_the_server_recovers(watched):
    assert watched.post(COMPLETIONS, body(5) | {"prompt": [1000]}).status_code == 503
    assert_recovers(watched)


def test_a_slow_step_turns_readiness_off_and_is_waited_for():
    with serving(*SIMULATED, "--sim-faults", "slow=1000:3", "--ready-timeout", "0.5") as server:
        engine = server.engine_pid()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.post, COMPLETIONS, body(5) | {"prompt": [1000]})
            wait_until(lambda: httpx.get(server.url + "/health/ready").status_code == 503)
            metrics = httpx.get(server.operator + "/metrics").text
            [age] = re.findall(r"^penstock_engine_step_age_seconds{.*} (.*)$", metrics, re.MULTILINE)
            assert 0.5 <= float(age) < 10
            assert answer.result().status_code == 200
        server.wait_ready()
        assert server.engine_pid() == engine


def test_a_load_that_takes_too_long_ends_the_server_with_one_line():
    server = Server(*SIMULATED, "--load-timeout", "0.001")
    assert server.process.wait(30) == 1
    server.wait_for_log(r"not loaded within 0.001 s \(--load-timeout\)")


def test_a_killed_server_leaves_no_files(tmp_path):
    with serving(*SIMULATED, environ={"TMPDIR": str(tmp_path)}) as server:
        assert list(tmp_path.iterdir()) == []
        os.kill(server.engine_pid(), signal.SIGKILL)  # the next one has a socket of its own
        wait_until(lambda: server.post(COMPLETIONS, body()).status_code == 200)
        assert list(tmp_path.iterdir()) == []


def test_an_engine_is_not_blamed_for_a_gateway_that_stood_still(watched):
    engine = watched.engine_pid()
    watched.process.send_signal(signal.SIGSTOP)
    threading.Event().wait(3)
    watched.process.send_signal(signal.SIGCONT)
    assert watched.post(COMPLETIONS, body()).status_code == 200
    assert watched.engine_pid() == engine


@pytest.mark.parametrize("stream", [True, False])
def test_disconnects_free_blocks_at_once(stream, shared):
    before = Counter(shared.state()["finished"])
    if stream:
        with shared.stream(COMPLETIONS, body(5000)) as events:
            next(events)
    else:
        with connect(shared.http_port) as client:
            client.sendall(post(body(5000)))
            wait_until(lambda: shared.state()["num_running"] == 1)
    assert_idle(shared)
    assert Counter(shared.state()["finished"]) - before == {"abort": 1}


def test_random_aborts_leave_nothing_behind():
    def call(server: Server, number: int) -> None:
        with server.stream(COMPLETIONS, body(number % 40 + 1, n=number % 3 + 1)) as events:
            for _, _event in zip(range(number % 17), events, strict=False):
                pass

    flags = ("--sim-step-ms", "2", "--num-kv-blocks", "24", "--max-num-seqs", "16")
    with serving(*SIMULATED, *flags) as server:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda number: call(server, number), range(120)))
        assert_idle(server)
        assert server.state()["admitted"] == sum(number % 3 + 1 for number in range(120))


def test_a_full_queue_is_503_with_retry_after():
    flags = ("--max-num-seqs", "1", "--max-queued-requests", "1")
    with serving(*SLOW, *flags) as server, server.stream(COMPLETIONS, body(5000)) as events:
        next(events)
        with ThreadPoolExecutor(4) as pool:
            waiting = pool.submit(server.post, COMPLETIONS, body(5000, user="waits"))
            wait_until(lambda: server.state()["num_waiting"] == 1)
            refused = server.post(COMPLETIONS, body())
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            with pytest.raises(openai.InternalServerError):
                server.client().completions.create(**body())
            server.close()
            with pytest.raises(httpx.HTTPError):
                waiting.result()


def test_deadlines_hold_in_the_queue_and_while_running():
    with serving(*SLOW, "--max-num-seqs", "1", "--request-timeout", "1") as server:
        with server.stream(COMPLETIONS, body(5000)) as events:
            next(events)
            queued = server.post(COMPLETIONS, body(5000))
            assert queued.status_code == 504
            assert queued.json()["error"]["code"] == "deadline_exceeded"
            rest = list(events)
        assert rest[-2]["error"]["code"] == "deadline_exceeded"
        assert rest[-1] == "[DONE]"
        assert_idle(server)


def test_a_client_may_set_its_own_deadline(shared):
    late = shared.post(COMPLETIONS, body(5000), headers={"X-Request-Timeout": "0.2"})
    assert late.status_code == 504
    for nonsense in ("soon", "-1", "0", "1e9", "nan"):
        refused = shared.post(COMPLETIONS, body(), headers={"X-Request-Timeout": nonsense})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("X-Request-Timeout must be a number of seconds")
    assert shared.post(COMPLETIONS, body(), headers={"X-Request-Timeout": "30"}).status_code == 200
    assert_idle(shared)


def test_keys_are_asked_for_everywhere_but_on_health(with_keys):
    assert httpx.get(with_keys.url + "/health/ready").status_code == 200
    for path in ("/v1/models", "/metrics", "/version", "/v1/absent"):
        assert httpx.get(with_keys.url + path).status_code == 401
    assert httpx.get(with_keys.operator + "/metrics").status_code == 200, "on loopback metrics are open"
    with pytest.raises(openai.AuthenticationError):
        with_keys.client("wrong").completions.create(**body())
    for key in ("right", "other"):
        assert with_keys.client(key).completions.create(**body()).choices
    assert not any("right" in line for line in with_keys.log)


def test_tenants_do_not_share_cached_prefixes(with_keys):
    prompt = {"model": "m", "prompt": [list(range(300, 400))], "max_tokens": 1}
    cached = [
        with_keys.client(key).completions.create(**prompt).usage.prompt_tokens_details.cached_tokens
        for key in ("right", "right", "other", "other")
    ]
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 0


def test_grpc_health_follows_readiness():
    with serving(*SIMULATED) as server, grpc.insecure_channel(server.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        wait_until(lambda: stub.Check(request).status == health_pb2.HealthCheckResponse.SERVING)
        watch = stub.Watch(request)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        server.process.send_signal(signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_metrics_add_up():
    with serving(*SIMULATED) as server:
        for _ in range(3):
            server.post(COMPLETIONS, body(5, n=2))
        assert_idle(server)
        text = httpx.get(server.operator + "/metrics").text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("penstock_"))
        assert values['penstock_requests_finished_total{finish_reason="length",model="m"}'] == "6.0"
        assert values['penstock_generation_tokens_total{model="m"}'] == "30.0"
        # three prompts of three tokens, and each second sample computes the last one again for its logits
        assert values['penstock_prompt_tokens_total{model="m"}'] == "12.0"
        assert values['penstock_time_to_first_token_seconds_count{model="m"}'] == "6.0"
        assert values['penstock_inter_token_latency_seconds_count{model="m"}'] == "24.0"
        assert values['penstock_request_duration_seconds_count{model="m"}'] == "6.0"
        assert values['penstock_kv_cache_usage_ratio{model="m"}'] == "0.0"


def test_the_live_feed_tells_the_scheduler_s_state(shared):
    with httpx.stream("GET", shared.operator + "/debug/scheduler/stream") as feed:
        assert feed.headers["content-type"].startswith("text/event-stream")
        assert '"num_running":0' in next(line for line in feed.iter_lines() if line.startswith("data: "))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("/no/such/folder",), "there is no folder or file /no/such/folder"),
        (("--model-repository", "/no/such/folder"), "model-repository: "),
        (("--chat-template", "/no/such/file"), "chat-template: "),
        (("--host", "192.0.2.1", "--allow-anonymous"), "--host: cannot listen on 192.0.2.1:"),
        (
            ("--http-address", "no.such.host.invalid", "--allow-anonymous"),
            "--http-address: cannot listen on no.such.host.invalid:",
        ),
        (("--grpc-use-ssl",), "grpc-server-key: TLS needs this file"),
        (("--grpc-restricted-protocol", "no-header", "--allow-grpc=false"), "grpc-restricted-protocol: "),
        (("--http-use-ssl",), "http-server-key: TLS needs this file"),
        (("--max-num-seqs", "64", "--max-num-batched-tokens", "8"), "--max-num-batched-tokens (8) must be at least"),
        (("--max-model-len", "1000000"), "1000000"),
    ],
)
def test_a_server_that_cannot_start_says_why_and_ends_with_1(flags, said, caplog):
    assert said in refusal(caplog, *flags)


def test_the_process_of_a_server_that_cannot_start_ends_with_1():
    server = Server("/no/such/folder")
    assert server.process.wait(60) == 1
    server.wait_for_log("ERROR .*there is no folder or file /no/such/folder")
    assert not any("Traceback" in line for line in server.log)


@pytest.mark.parametrize("port", ["http", "grpc", "metrics"])
def test_a_port_in_use_is_said_in_one_line_with_the_flag(port, caplog):
    with socket.create_server(("127.0.0.1", 0)) as first:
        taken = first.getsockname()[1]
        said = refusal(caplog, *SIMULATED, f"--{port}-port", str(taken))
    assert said == f"--{port}-port: cannot listen on 127.0.0.1:{taken}: Address already in use"


def test_ipv6_addresses_are_addresses_too():
    server = Server(*SIMULATED, "--host", "::1")
    try:
        port = server.wait_for_log(r"listening on http://\[::1\]:(\d+)")[1]
        assert httpx.get(f"http://[::1]:{port}/health").status_code == 200
    finally:
        server.close()


@pytest.mark.parametrize("where", ["__init__", "start"])
def test_an_error_that_nobody_foresaw_ends_the_start_with_one_line(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("first\n\nlast\n")

    monkeypatch.setattr(f"penstock.gateway.server.lifecycle.ServedModels.{where}", broken)
    told = refusal(caplog, "--engine=simulated")
    prefix = "the models could not be loaded: " if where == "start" else ""
    assert told == prefix + "RuntimeError: first; last; --log-level debug shows the trace"
