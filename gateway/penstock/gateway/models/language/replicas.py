"""Several engines of a model, from settings. Loaded only where there are some."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from penstock.engines.client.engine import Engine
from penstock.engines.contract.messages import StepRecord
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.door.spec import DoorSpec
from penstock.engines.host.content_digest import ModelDigests
from penstock.engines.host.cores import shares
from penstock.engines.host.gpus import visible_gpus
from penstock.engines.registry import EngineSpec
from penstock.engines.replicas.engine import ReplicatedEngine
from penstock.engines.replicas.state import ReplicaSettings, RoutingPolicy
from penstock.engines.vllm.contract import is_cpu_build
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.configuration.sections.language_model import ModelSettings
from penstock.gateway.configuration.sections.server import ServerConfig
from penstock.gateway.models.language.adapters import AdapterSet
from penstock.gateway.models.language.engine_sharing import (
    attached_engine,
    check_handover,
    handover_memory,
    replicas_elsewhere,
    sharing,
)
from penstock.gateway.models.language.models import ModelSource
from penstock.gateway.models.memory.budgeted_engine import BudgetedEngine

_OF_CPUS = ("openvino", "torch", "vllm")
"""Engines that compute on as many cores as they may run on."""


def replicated_engine(
    settings: ModelSettings,
    server: ServerConfig,
    source: ModelSource,
    spec: EngineSpec | None,
    make: Callable[[int, EngineSpec, int], BudgetedEngine],
    on_step: Callable[[StepRecord], None],
) -> ReplicatedEngine:
    """`spec` is that of the engines that are started here, None where there are none. `make` makes one of them: of its
    number, its own specification, and of how many share its devices. Raises ConfigError."""
    replication, engines = settings.replication, list[Engine]()
    if spec is None:
        check_handover(settings, spec)
    memory = handover_memory(settings)
    if spec is not None:
        _check(settings, spec)
        on_gpus = _is_on_gpus(spec)
        specs = replica_specs(spec, replication.replicas, on_gpus=on_gpus)
        if memory is not None:
            specs = [sharing(one, memory, number, replication.prefill_replicas) for number, one in enumerate(specs)]
        engines += [make(number, one, 1 if on_gpus else replication.replicas) for number, one in enumerate(specs)]
    fingerprint = _same
    if replication.replica_address or spec is None:
        addresses, digests = replicas_elsewhere(settings, server, source)
        no_adapters = AdapterSet()
        engines += [attached_engine(settings, server, address, digests, on_step, no_adapters) for address in addresses]
        if spec is not None:
            fingerprint = partial(_fingerprint, spec, digests)
    routing = ReplicaSettings(
        policy=RoutingPolicy(replication.replica_routing),
        resume=replication.resume != "off",
        resume_required=replication.resume == "on",
        resume_wait=replication.resume_wait,
        num_prefill=replication.prefill_replicas,
        handover_min_tokens=replication.handover_min_tokens,
    )
    return ReplicatedEngine(
        engines, routing, num_elsewhere=len(replication.replica_address), fingerprint=fingerprint, memory=memory
    )


def _same(info: ModelInfo) -> str:
    """Engines that were told the same give the same tokens."""
    return ""


def _fingerprint(spec: EngineSpec, model: ModelDigests, info: ModelInfo) -> str:
    """What engines elsewhere say of themselves."""
    from penstock.engines.registry import engine_fingerprint

    return engine_fingerprint(spec, info, model)


def _check(settings: ModelSettings, spec: EngineSpec) -> None:
    replication = settings.replication
    if replication.resume == "on" and (spec.scheduling == "engine" or spec.runner == "tensorrt_llm"):
        raise ConfigError("resume: an engine that uses its own scheduler cannot go on with what another has begun")
    if replication.replicas == 1:
        return
    if spec.runner == "tensorrt_llm" or (spec.runner == "vllm" and not _has_one_device(spec)):
        raise ConfigError(
            f"replicas: the {spec.runner} engine divides devices by itself; start a server for each replica"
        )
    if _is_on_gpus(spec):
        device, gpus = spec.options["device"], visible_gpus()
        if device not in ("auto", "cuda"):
            raise ConfigError(f"replicas: each takes a GPU of its own, so device cannot be {device}")
        if replication.replicas > gpus:
            raise ConfigError(f"replicas: each takes a GPU of its own, and there are {gpus}")


def _has_one_device(spec: EngineSpec) -> bool:
    """vLLM on a CPU, in the engine's own process."""
    return is_cpu_build() and spec.options["tensor_parallel_size"] * spec.options["pipeline_parallel_size"] == 1


def _is_on_gpus(spec: EngineSpec) -> bool:
    if spec.runner != "torch":
        return False
    device = spec.options["device"]
    return device.startswith("cuda") or (device == "auto" and visible_gpus() > 0)


def replica_specs(spec: EngineSpec, count: int, *, on_gpus: bool) -> list[EngineSpec]:
    """One for each: with its share of CPUs and NUMA nodes, or a GPU of its own, with its own folder and share of the
    tier behind the KV cache, and with ports of its own for KV events. Raises ConfigError."""
    if count == 1:
        return [spec]
    placement = spec.placement
    is_placed = placement.cpus is not None or placement.numa_nodes is not None
    places = [placement] * count
    if is_placed or (spec.runner in _OF_CPUS and not on_gpus and spec.options["threads"] is None):
        places = shares(placement, count)
    specs = [msgspec.structs.replace(spec, placement=place) for place in places]
    if on_gpus:
        specs = [
            msgspec.structs.replace(one, options=one.options | {"device": f"cuda:{number}"})
            for number, one in enumerate(specs)
        ]
    tier = spec.scheduler
    if tier.kv_offload_dir:
        specs = [
            msgspec.structs.replace(
                one,
                scheduler=msgspec.structs.replace(
                    tier,
                    kv_offload_dir=f"{tier.kv_offload_dir}/replica-{number}",
                    kv_offload_bytes=tier.kv_offload_bytes // count,
                ),
            )
            for number, one in enumerate(specs)
        ]
    events = tier.kv_events
    if events is not None:
        try:
            own = [events.of_replica(number, count) for number in range(count)]
        except ValueError as error:
            raise ConfigError(str(error)) from None
        specs = [
            msgspec.structs.replace(one, scheduler=msgspec.structs.replace(one.scheduler, kv_events=its_events))
            for one, its_events in zip(specs, own, strict=True)
        ]
    if spec.door is not None:
        doors = [_door(spec.door, number) for number in range(count)]
        specs = [msgspec.structs.replace(one, door=door) for one, door in zip(specs, doors, strict=True)]
    return specs


def _door(door: DoorSpec, number: int) -> DoorSpec:
    """The first one's is where it was said; the others' are behind it: PATH-1 or the next port."""
    if not number:
        return door
    place, colon, port = door.address.rpartition(":")
    is_tcp = door.address.startswith("tcp://")
    address = f"{place}{colon}{int(port) + number}" if is_tcp else f"{door.address}-{number}"
    return msgspec.structs.replace(door, address=address)
