"""From settings to several engines of a model. Loaded only where there are some."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.engines.host.gpus import visible_gpus
from penstock.engines.host.shares import shares
from penstock.engines.registry import EngineSpec
from penstock.engines.replicas.engine import ReplicatedEngine
from penstock.engines.replicas.settings import ReplicaSettings, RoutingPolicy
from penstock.gateway.configuration.config import Config, ConfigError
from penstock.gateway.memory.budgeted_engine import BudgetedEngine

_OF_CPUS = ("openvino", "torch")
"""Engines that compute on as many cores as they may run on."""


def replicated_engine(
    config: Config, spec: EngineSpec, engine: Callable[[int, EngineSpec, int], BudgetedEngine]
) -> ReplicatedEngine:
    """`engine` makes one of them: of its number, its specification, and of how many share its devices. Raises
    ConfigError."""
    given, on_gpus = config.replication, _is_on_gpus(spec)
    _check(config, spec)
    specs = replica_specs(spec, given.replicas, on_gpus=on_gpus)
    sharing = 1 if on_gpus else given.replicas
    return ReplicatedEngine(
        [engine(number, each, sharing) for number, each in enumerate(specs)],
        ReplicaSettings(
            policy=RoutingPolicy(given.replica_routing), resume=given.resume != "off", resume_wait=given.resume_wait
        ),
    )


def _check(config: Config, spec: EngineSpec) -> None:
    given = config.replication
    if given.resume == "on" and (spec.scheduling == "engine" or spec.runner == "tensorrt_llm"):
        raise ConfigError("resume: an engine that uses its own scheduler cannot go on with what another has begun")
    if given.replicas == 1:
        return
    if spec.runner in ("vllm", "tensorrt_llm"):
        raise ConfigError(
            f"replicas: the {spec.runner} engine divides devices by itself; start a server for each replica"
        )
    if _is_on_gpus(spec):
        device, gpus = spec.options["device"], visible_gpus()
        if device not in ("auto", "cuda"):
            raise ConfigError(f"replicas: each takes a GPU of its own, so device cannot be {device}")
        if given.replicas > gpus:
            raise ConfigError(f"replicas: each takes a GPU of its own, and there are {gpus}")


def _is_on_gpus(spec: EngineSpec) -> bool:
    if spec.runner != "torch":
        return False
    device = spec.options["device"]
    return device.startswith("cuda") or (device == "auto" and visible_gpus() > 0)


def replica_specs(spec: EngineSpec, count: int, *, on_gpus: bool) -> list[EngineSpec]:
    """One for each: with its share of CPUs and NUMA nodes, or a GPU of its own, and with its own folder and share of
    the tier behind the KV cache."""
    if count == 1:
        return [spec]
    asked = spec.placement
    is_placed = asked.cpus is not None or asked.numa_nodes is not None
    places = [asked] * count
    if is_placed or (spec.runner in _OF_CPUS and not on_gpus and spec.options["threads"] is None):
        places = shares(asked, count)
    found = [msgspec.structs.replace(spec, placement=place) for place in places]
    if on_gpus:
        found = [
            msgspec.structs.replace(each, options=each.options | {"device": f"cuda:{number}"})
            for number, each in enumerate(found)
        ]
    tier = spec.scheduler
    if tier.kv_offload_dir:
        found = [
            msgspec.structs.replace(
                each,
                scheduler=msgspec.structs.replace(
                    tier,
                    kv_offload_dir=f"{tier.kv_offload_dir}/replica-{number}",
                    kv_offload_bytes=tier.kv_offload_bytes // count,
                ),
            )
            for number, each in enumerate(found)
        ]
    return found
