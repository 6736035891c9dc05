"""SGLang's gateway in front of two servers: requests go where their beginning is cached, and one drains away."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.routers import Load, running
from support.server import Server, free_port, serving, wait_until

pytest.importorskip("sglang_router")
SIMULATED = ("--engine", "simulated", "--served-model-name", "m", "--sim-step-ms", "2")
HITS = re.compile(r'^penstock_prefix_cache_(hits|queries)_total\{model="m"\} (\S+)$', re.MULTILINE)
ROUNDS = 3


@contextmanager
def gateway(folder: Path, servers: list[Server], policy: str) -> Iterator[str]:
    """The address of its completions."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
        *("--policy", policy, "--worker-urls", *(server.url for server in servers)),
        *("--health-check-endpoint", "/health/ready", "--health-check-interval-secs", "1"),
        *("--health-failure-threshold", "1", "--prometheus-port", str(free_port())),
    ]
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        return httpx.post(f"{url}/v1/completions", json=request("warm up")).status_code == 200

    with running(command, folder / f"{policy}.log", ready):
        yield f"{url}/v1/completions"


def request(prompt: str) -> dict[str, Any]:
    return {"model": "m", "prompt": prompt, "max_tokens": 4}


def conversation(client: int) -> str:
    """Different from all others from its first word on."""
    return " ".join(f"{chr(97 + client)}{word}" for word in range(80))


def hit_rate(servers: list[Server]) -> float:
    found = {"hits": 0.0, "queries": 0.0}
    for server in servers:
        for name, value in HITS.findall(httpx.get(server.operator + "/metrics").text):
            found[name] += float(value)
    return found["hits"] / found["queries"]


def test_requests_go_where_their_beginning_is_cached(tmp_path: Path) -> None:
    rates = {}
    for policy in ("cache_aware", "round_robin"):
        with ExitStack() as stack:
            servers = [stack.enter_context(serving(*SIMULATED)) for _ in range(2)]
            url = stack.enter_context(gateway(tmp_path, servers, policy))
            for turn in range(ROUNDS):
                for client in range(9):  # an odd number: round robin changes places in each round
                    answer = httpx.post(url, json=request(conversation(client) + f" and turn {turn}"), timeout=60)
                    assert answer.status_code == 200, answer.text
            rates[policy] = hit_rate(servers)
    assert rates["cache_aware"] > 1.5 * rates["round_robin"], rates


def test_a_server_drains_away_without_a_failure(tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(*SIMULATED, "--drain-delay", "5")) for _ in range(2)]
        url = stack.enter_context(gateway(tmp_path, servers, "cache_aware"))

        def body(client: int, number: int) -> dict[str, Any]:
            return request(f"{conversation(client)} {number}") | {"stream": number % 2 == 0}

        with Load(url, body, 8) as load:
            load.answer_more(100)
            servers[0].process.send_signal(signal.SIGTERM)
            assert servers[0].process.wait(30) == 0
            load.answer_more(100)
        assert load.failures == []
        wait_until(lambda: servers[1].state()["num_running"] == 0)
