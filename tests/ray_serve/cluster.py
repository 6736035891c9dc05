"""A Ray cluster of two nodes on this machine, and what is deployed there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
import ray._private.node
import yaml
from ray._private.node import Node
from ray._private.ray_constants import PROCESS_TYPE_RAYLET
from ray._raylet import persist_port
from ray.cluster_utils import Cluster

from support.server import free_port

SIMULATED = {
    "engine": "simulated",
    "served_model_name": ["m"],
    "sim_step_ms": 20,
    "max_num_seqs": 64,
    "log_level": "warning",
}
_MS, _SECONDS = "240000", "240"
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # a busy machine is slow, and not dead
    "RAY_health_check_timeout_ms": "60000",
    "RAY_agent_register_timeout_ms": _MS,
    "RAY_gcs_server_request_timeout_seconds": _SECONDS,
    "RAY_gcs_rpc_server_connect_timeout_s": _SECONDS,
    "RAY_gcs_rpc_server_reconnect_timeout_s": _SECONDS,
    "RAY_gcs_server_port_wait_time_s": _SECONDS,
    "RAY_py_gcs_connect_timeout_s": _SECONDS,
    "RAY_worker_register_timeout_seconds": _SECONDS,
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": _SECONDS,
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": _SECONDS,
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": _SECONDS,
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
CPUS_OF_A_NODE = 8
_STORE = 100 << 20
_AGENTS = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port", "dashboard_agent_listen_port")


class _PatientNode(Node):
    """A raylet waits 30 s for files in which its agents say their ports, and ends itself without them. A busy machine
    needs longer to start agents, so their ports are given, and the files are there before."""

    def start_raylet(self, *args: Any, **kwargs: Any) -> None:
        for name in _AGENTS:
            persist_port(self._session_dir, self._node_id, name, getattr(self._ray_params, name))
        super().start_raylet(*args, **kwargs)


ray._private.node.Node = _PatientNode


class RayCluster:
    """The head has the only proxy, so that removing the other node cuts no client off."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "penstock.yaml"
        self.http_port, self.grpc_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.http_port}"
        self._cluster = Cluster(initialize_head=True, head_node_args=_node())
        self._second: Any = None
        self.add_node()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add_node(self) -> None:
        self._second = self._cluster.add_node(**_node())

    def _of_second_node(self) -> list[psutil.Process]:
        [raylet] = self._second.all_processes[PROCESS_TYPE_RAYLET]
        return psutil.Process(raylet.process.pid).children(recursive=True)

    def replicas_of_second_node(self) -> int:
        return len(set(self._of_second_node()) & set(self.replicas()))

    def remove_node(self) -> None:
        """As a machine that is lost: nothing on it gets to end."""
        processes = self._of_second_node()
        self._cluster.remove_node(self._second, allow_graceful=False)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _tables(self, ray_table: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        ports = {"http_port": self.http_port, "grpc_port": self.grpc_port, "grpc": True}
        table = {"address": self.address, "proxies": "HeadOnly", "cpus": 1, **ports, **ray_table}
        return {**SIMULATED, **settings, "ray": table}

    def deploy_here(self, ray_table: dict[str, Any], **settings: Any) -> None:
        """In this process, and with a new proxy: one that runs keeps the router of an application."""
        from penstock.gateway.ray_serve.cluster import deploy
        from penstock.gateway.ray_serve.deployment_file import read_deployment

        deploy(read_deployment(self._tables(ray_table, settings), environ={}))
        for proxy in self._actors("ray::ProxyActor"):
            self.kill(proxy)

    def deploy(self, ray_table: dict[str, Any], **settings: Any) -> None:
        """As a user does; returns when it serves."""
        self._file.write_text(yaml.safe_dump(self._tables(ray_table, settings)))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        done = subprocess.run(
            [sys.executable, "-m", "penstock.gateway.cli", "deploy", "ray", str(self._file)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert self.url in done.stdout

    def replicas(self) -> list[psutil.Process]:
        """The actors of replicas."""
        return self._actors("ServeReplica:penstock")

    def _actors(self, name: str) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if name in (process.cmdline() or [""])[0]:
                    found.append(process)
        return found

    def wait_for(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        ends = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < ends, "it did not come"
            time.sleep(0.2)

    def wait_for_replicas(self, number: int) -> None:
        """That answer."""
        seen: set[str] = set()

        def all_seen() -> bool:
            with suppress(httpx.HTTPError):
                answer = httpx.get(f"{self.url}/v1/models", timeout=30)
                seen.add(answer.headers.get("x-penstock-replica", ""))
            return len(seen - {""}) >= number

        self.wait_for(all_seen)

    def kill(self, process: psutil.Process) -> None:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)

    def stop(self) -> None:
        if ray.is_initialized():
            ray.shutdown()
        self._cluster.shutdown()


def _node() -> dict[str, Any]:
    ports = {name: free_port() for name in _AGENTS}
    return {"num_cpus": CPUS_OF_A_NODE, "object_store_memory": _STORE, "include_dashboard": False, **ports}
