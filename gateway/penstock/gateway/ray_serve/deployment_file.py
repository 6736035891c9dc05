"""The file that describes a deployment: a configuration as for `penstock serve`, with a table `ray` beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.gateway.configuration.config import Config, ConfigError, changes, load_config, overlay, read_table
from penstock.gateway.ray_serve.settings import RaySettings, read_ray_settings
from penstock.gateway.requests.exposure import check_exposure

_RAY = "ray"


@dataclass(frozen=True, slots=True)
class Deployment:
    settings: dict[str, Any]
    """By name, what differs from the defaults."""
    ray: RaySettings

    def tables(self) -> dict[str, Any]:
        """As they would stand in one file."""
        ray = msgspec.to_builtins(self.ray)
        usual = msgspec.to_builtins(RaySettings())
        return {**self.settings, _RAY: {name: value for name, value in ray.items() if value != usual[name]}}

    def replica_settings(self) -> dict[str, Any]:
        """Of the server in a replica, which has no ports of its own, by name."""
        return {**self.settings, **_IN_A_REPLICA, "host": self.ray.host}

    def replica_config(self) -> Config:
        """Raises ConfigError."""
        return overlay(Config(), self.replica_settings())


def read_deployment(source: Path | Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Deployment:
    """From a file, or its tables. Raises ConfigError, also for what cannot be behind Ray Serve."""
    table = read_table(source) if isinstance(source, Path) else dict(source)
    ray = read_ray_settings(table.pop(_RAY, {}))
    config = load_config({}, table=table, environ=environ)
    settings = changes(config)
    for name in sorted(settings.keys() & _NOT_HERE.keys()):
        raise ConfigError(f"{name}: {_NOT_HERE[name]}")
    for name in _PATHS & settings.keys():
        settings[name] = _absolute(settings[name])
    settings.setdefault("threads", max(1, int(ray.cpus)))  # Ray counts CPUs, and keeps nobody from using more
    check_exposure(overlay(config, {"host": ray.host, "allow_grpc": ray.grpc, "allow_metrics": False}))
    deployment = Deployment(settings, ray)
    deployment.replica_config()
    return deployment


def _absolute(value: Any) -> Any:
    """Replicas have another working directory. What is no path here, a hub's id for one, stays as it is."""
    if isinstance(value, str):
        return os.path.abspath(value) if os.path.exists(value) else value
    return [_absolute(item) for item in value]


_PATHS = {
    *("model", "speculative_model", "chat_template", "api_key_file", "lora_directory"),
    *("model_repository", "embedding_model", "backend_directory"),
}
_IN_A_REPLICA = {
    **{f"allow_{port}": False for port in ("http", "grpc", "metrics")},
    "data_memory": 0,
    "stored_responses": 0,
    "background_responses": 0,
}
_PROXIES = "Ray Serve's proxies listen, and not Penstock: "
_FOR_ALL = "each replica would have its own, and a request reaches any of them"
_NOT_HERE = {
    **dict.fromkeys(("host", "http_address", "grpc_address"), _PROXIES + "set ray.host"),
    "http_port": _PROXIES + "set ray.http_port",
    "grpc_port": _PROXIES + "set ray.grpc_port",
    **dict.fromkeys(("allow_http", "allow_grpc"), _PROXIES + "set ray.grpc to have gRPC beside HTTP"),
    **dict.fromkeys(("metrics_port", "metrics_address", "allow_metrics"), _PROXIES + "GET /metrics is on their port"),
    **dict.fromkeys(("http_use_ssl", "http_use_ssl_mutual", "grpc_use_ssl"), _PROXIES + "TLS is set up in Ray Serve"),
    **dict.fromkeys(("data_dir", "data_memory", "stored_responses", "background_responses"), _FOR_ALL),
    "allow_client_shm": "clients share no memory with a replica",
    "load_on_demand": _FOR_ALL,
    "fronts": "Ray Serve's proxies are in front; use ray.replicas",
    **dict.fromkeys(("kv_events", "engine_door", "resumable_streams"), "each replica would have its own"),
}
"""Settings that would have no effect, or another one than on a server of its own, with the reason."""
