"""Envoy in front of two servers: weights by their load reports, and one that drains away under load."""

from __future__ import annotations

import json
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

pytest.importorskip("envoy")
ENVOY = Path(sys.executable).with_name("envoy")
SIMULATED = ("--engine", "simulated", "--served-model-name", "m", "--max-num-seqs", "16")
_HTTP = "type.googleapis.com/envoy.extensions.filters"
_POLICY = "type.googleapis.com/envoy.extensions.load_balancing_policies.client_side_weighted_round_robin.v3"


def bootstrap(port: int, admin: int, servers: list[Server]) -> dict[str, Any]:
    """Envoy's configuration, as docs/load_balancing.md has it."""
    retry = {
        "retry_on": "connect-failure,refused-stream,reset,unavailable,retriable-status-codes",
        "retriable_status_codes": [503],
        "num_retries": 3,
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                },
            }
        ],
        "host_selection_retry_max_attempts": 20,
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": "penstock", "timeout": "0s", "retry_policy": retry}}
    manager = {
        "@type": f"{_HTTP}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{_HTTP}.http.router.v3.Router"}}
        ],
    }
    weights = {
        "@type": f"{_POLICY}.ClientSideWeightedRoundRobin",
        "blackout_period": "0.5s",
        "weight_update_period": "0.2s",
    }
    cluster = {
        "name": "penstock",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_balancing_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.client_side_weighted_round_robin",
                        "typed_config": weights,
                    }
                }
            ]
        },
        "circuit_breakers": {"thresholds": [{"max_retries": 10_000}]},
        "common_lb_config": {"healthy_panic_threshold": {"value": 1}},
        "health_checks": [
            {
                "timeout": "3s",
                "interval": "0.5s",
                "no_traffic_interval": "0.5s",
                "unhealthy_threshold": 3,
                "healthy_threshold": 1,
                "http_health_check": {"path": "/health/ready"},
            }
        ],
        "load_assignment": {
            "cluster_name": "penstock",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(s.http_port)}} for s in servers]}],
        },
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    listener = {"name": "in", "address": _address(port), "filter_chains": [chain]}
    return {
        "admin": {"address": _address(admin)},
        "static_resources": {"listeners": [listener], "clusters": [cluster]},
    }


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


class Envoy:
    def __init__(self, port: int, admin: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1/completions"
        self._admin = f"http://127.0.0.1:{admin}"

    def served(self) -> dict[int, int]:
        """Requests that each server, by its port, has got."""
        [cluster] = httpx.get(f"{self._admin}/clusters?format=json").json()["cluster_statuses"]
        return {
            host["address"]["socket_address"]["port_value"]: next(
                int(stat.get("value", 0)) for stat in host["stats"] if stat["name"] == "rq_total"
            )
            for host in cluster["host_statuses"]
        }


@contextmanager
def envoy(folder: Path, servers: list[Server]) -> Iterator[Envoy]:
    port, admin = free_port(), free_port()
    config = folder / "envoy.json"
    config.write_text(json.dumps(bootstrap(port, admin, servers)))
    command = [str(ENVOY), "-c", str(config), "--disable-hot-restart", "--concurrency", "1", "--log-level", "warn"]
    with running(command, folder / "envoy.log", lambda: httpx.get(f"http://127.0.0.1:{admin}/ready").is_success):
        made = Envoy(port, admin)
        wait_until(lambda: httpx.get(made.url.replace("/v1/completions", "/health/ready")).status_code == 200)
        yield made


def request(client: int, number: int) -> dict[str, Any]:
    return {"model": "m", "prompt": [300 + client, number % 1000], "max_tokens": 4, "stream": number % 2 == 0}


@pytest.mark.parametrize("form", ["text", "json", "bin"])
def test_the_server_with_room_gets_more(tmp_path: Path, form: str) -> None:
    """Both answer every request; one of them takes five times as long for it."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serving(*SIMULATED, "--load-reports", form, "--sim-step-ms", step))
            for step in ("16", "80")  # long ones: so busy is no machine that its own time would count
        ]
        proxy = stack.enter_context(envoy(tmp_path, servers))
        with Load(proxy.url, request, 12) as load:
            load.answer_more(200)  # until weights have been told
            before = proxy.served()
            load.answer_more(400)
            after = proxy.served()
    assert load.failures == []
    fast, slow = (after[server.http_port] - before[server.http_port] for server in servers)
    assert fast > 1.5 * slow, f"{fast} and {slow}"


def test_a_server_drains_away_without_a_failure(tmp_path: Path) -> None:
    flags = (*SIMULATED, "--load-reports", "text", "--sim-step-ms", "20", "--drain-delay", "2")
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(*flags)) for _ in range(2)]
        proxy = stack.enter_context(envoy(tmp_path, servers))
        with Load(proxy.url, request, 12) as load:
            load.answer_more(100)
            servers[0].process.send_signal(signal.SIGTERM)
            assert servers[0].process.wait(30) == 0
            load.answer_more(100)
        assert load.failures == []
        assert servers[1].process.poll() is None
