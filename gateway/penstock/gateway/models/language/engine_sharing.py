"""Engines that several processes use: where the door of one is, and what a server says of one that runs elsewhere."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.engines.contract.messages import StepRecord
from penstock.engines.door.spec import DoorAddress, DoorSpec
from penstock.engines.host.content_digest import ModelDigests
from penstock.engines.process.liveness import WatchdogConfig
from penstock.engines.registry import EngineSpec
from penstock.engines.vllm.contract import is_cpu_build
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.configuration.sections.language_model import (
    DoorConfig,
    ModelSettings,
    ReplicaConfig,
)
from penstock.gateway.configuration.sections.server import ServerConfig
from penstock.gateway.models.language.adapters import AdapterSet
from penstock.gateway.models.language.models import ModelSource

BLOCK_HOSTS = "the openvino engine, and vllm on CPUs,"


def is_block_host(engine: str) -> bool:
    """As far as it is known before the engine is started."""
    return engine in ("openvino", "simulated") or (engine == "vllm" and is_cpu_build())


if TYPE_CHECKING:
    from penstock.engines.door.attached import AttachedEngine
    from penstock.engines.handover.memory import HandoverMemory


def check_handover(settings: ModelSettings, spec: EngineSpec | None) -> None:
    """Raises ConfigError where no blocks can be handed over, or nothing asks for it."""
    replication, none = settings.replication, ReplicaConfig()
    if not replication.prefill_replicas:
        for name in ("handover_bytes", "handover_min_tokens"):
            if getattr(replication, name) != getattr(none, name):
                raise ConfigError(f"{name.replace('_', '-')}: nothing is handed over without prefill-replicas")
        return
    if replication.replica_address or spec is None:
        raise ConfigError("prefill-replicas: blocks are handed over on one machine, so replica-address does not fit")
    if not is_block_host(spec.runner):
        raise ConfigError(f"prefill-replicas: only {BLOCK_HOSTS} hand blocks over, not {spec.runner}")
    if spec.scheduling == "engine":
        raise ConfigError("prefill-replicas: does not apply to an engine that uses its own scheduler")
    if replication.prefill_replicas >= replication.replicas:
        raise ConfigError(
            f"prefill-replicas: {replication.prefill_replicas} of {replication.replicas} replicas leave none that "
            "generates"
        )
    if replication.resume == "off":
        raise ConfigError("prefill-replicas: a request goes on at another replica, so resume cannot be off")
    if not settings.cache.prefix_caching:
        raise ConfigError("prefill-replicas: blocks are found by way of the prefix cache, so prefix-caching must be on")
    if settings.cache.kv_offload_dir is not None:
        raise ConfigError("prefill-replicas: blocks come from shared memory or from kv-offload-dir, not from both")


def handover_memory(settings: ModelSettings) -> HandoverMemory | None:
    """None: nothing is handed over. Raises ConfigError."""
    replication = settings.replication
    if not replication.prefill_replicas:
        return None
    from penstock.engines.handover.memory import HandoverMemory  # few have it

    try:
        return HandoverMemory(replication.prefill_replicas, replication.handover_bytes)
    except OSError as error:
        raise ConfigError(f"prefill-replicas: no shared memory: {error}") from error


def sharing(spec: EngineSpec, memory: HandoverMemory, number: int, num_prefill: int) -> EngineSpec:
    """Replica `number`: the first ones write what they compute, all read."""
    handover = memory.config(number if number < num_prefill else None)
    return msgspec.structs.replace(spec, scheduler=msgspec.structs.replace(spec.scheduler, handover=handover))


_TCP = re.compile(r"tcp://(\*|[A-Za-z0-9._-]+|\[[0-9a-fA-F:.%a-z]+\]):[0-9]{1,5}")
KEPT = {"model", "revision", "served_model_name", "chat_template", "chat_template_content_format"}
KEPT |= {"special_tokens_in_content", "tool_parser", "reasoning_parser", "policy", "request_timeout"}
"""Settings of a model that are the gateway's, wherever its engine runs."""


def door_spec(settings: ModelSettings, source: ModelSource) -> DoorSpec | None:
    """Of the engine that this server starts; None: it has no door. Raises ConfigError."""
    door = settings.door
    if door.engine_door is None:
        if door.engine_door_clients != DoorConfig().engine_door_clients:
            raise ConfigError("engine-door-clients: there is no engine-door")
        if door.engine_key is not None and door.engine_address is None and not settings.replication.replica_address:
            raise ConfigError("engine-key: there is neither an engine-door nor an engine-address")
        return None
    if settings.model.sleep_idle_seconds:
        raise ConfigError("sleep-idle-seconds: an engine with a door may be in use while this server is idle")
    key = _key("engine-door", door.engine_door, door.engine_key)
    if door.engine_door.startswith("ipc://"):
        _check_private(Path(door.engine_door.removeprefix("ipc://")).parent)
    return DoorSpec(address=door.engine_door, key=key, model=_digests(source), max_clients=door.engine_door_clients)


def engine_elsewhere(
    settings: ModelSettings, server: ServerConfig, source: ModelSource
) -> tuple[DoorAddress, ModelDigests] | None:
    """Where the model's engine runs, if that is elsewhere, and what its files must be. Raises ConfigError, also for
    settings that an engine has where it is started."""
    address = settings.door.engine_address
    if address is None:
        return None
    if settings.replication != ReplicaConfig():
        raise ConfigError("replicas: with engine-address there is one engine; replica-address names several")
    _check_no_engine(settings, server, "engine-address")
    return DoorAddress(address, _key("engine-address", address, settings.door.engine_key)), _digests(source)


def replicas_elsewhere(
    settings: ModelSettings, server: ServerConfig, source: ModelSource
) -> tuple[list[DoorAddress], ModelDigests]:
    """Those of a model's replicas that run elsewhere. Raises ConfigError, where all do also for settings that an engine
    has where it is started."""
    replication = settings.replication
    if not replication.replicas:
        if not replication.replica_address:
            raise ConfigError("replicas: 0 needs a replica-address")
        _check_no_engine(settings, server, "replicas=0")
    elif settings.adapters.lora or settings.adapters.lora_directory:
        raise ConfigError("replica-address: engines elsewhere do not have the adapters of this server")
    addresses = []
    for address in replication.replica_address:
        key = None if address.startswith("ipc:") else settings.door.engine_key
        addresses.append(DoorAddress(address, _key("replica-address", address, key)))
    return addresses, _digests(source)


def _check_no_engine(settings: ModelSettings, server: ServerConfig, setting: str) -> None:
    """Raises ConfigError for settings of an engine that is started here: by `setting` there is none."""
    if settings.door.engine_door is not None:
        raise ConfigError(f"engine-door: with {setting} this server has no engine of its own")
    parts = (
        settings.model,
        settings.engine,
        settings.adapters,
        settings.cache,
        settings.scheduling,
        settings.simulated,
    )
    for section in parts:
        _check_default(section, setting)
    if server.stream_interval_ms != ServerConfig().stream_interval_ms:
        raise _set_at_engine("stream_interval_ms", setting)


def attached_engine(
    settings: ModelSettings,
    server: ServerConfig,
    address: DoorAddress,
    model: ModelDigests,
    on_step: Callable[[StepRecord], None],
    adapters: AdapterSet,
) -> AttachedEngine:
    """What `engine_elsewhere` has found. `adapters` follows those that the engine has."""
    from penstock.engines.door.attached import AttachedEngine  # a server with its own engines does not load it

    return AttachedEngine(
        address,
        watchdog_config(server),
        name=f"{server.id} on {socket.gethostname()}, process {os.getpid()}",
        model=model,
        policy=settings.scheduling.policy,
        on_step=on_step,
        on_adapters=adapters.follow,
    )


def watchdog_config(server: ServerConfig) -> WatchdogConfig:
    """How long an engine may take, wherever it runs."""
    return WatchdogConfig(
        timeout=server.watchdog_timeout,
        ready_timeout=server.ready_timeout or min(WatchdogConfig().ready_timeout, server.watchdog_timeout / 2),
        load_timeout=server.load_timeout,
    )


def _check_default(section: msgspec.Struct, setting: str) -> None:
    default = type(section)()
    for name in section.__struct_fields__:
        if name not in KEPT and getattr(section, name) != getattr(default, name):
            raise _set_at_engine(name, setting)


def _set_at_engine(name: str, setting: str) -> ConfigError:
    return ConfigError(f"{name.replace('_', '-')}: with {setting}, this is set where the engine is started")


def _key(setting: str, address: str, file: str | None) -> str:
    """Raises ConfigError for what is no address, and where other machines could use an engine without a key."""
    if address.startswith("ipc:///"):
        if file is not None:
            raise ConfigError(f"engine-key: {setting} is on this machine, where the folder's permissions decide")
        return ""
    if not _TCP.fullmatch(address):
        raise ConfigError(f"{setting}: {address} is neither ipc:///PATH nor tcp://HOST:PORT")
    if file is None:
        raise ConfigError(f"{setting}: over tcp an engine needs an engine-key (penstock key new --engine makes one)")
    from penstock.engines.door.keys import read_key

    try:
        return read_key(Path(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"engine-key: {error}") from None


def _check_private(folder: Path) -> None:
    """Who can reach a socket can use the engine. Makes the folder if need be. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ConfigError(f"engine-door: {error}") from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(f"engine-door: {folder} must belong to this user, and be open to nobody else (chmod 700)")


def _digests(source: ModelSource) -> ModelDigests:
    from penstock.engines.host.content_digest import model_digests

    try:
        return model_digests(source.folder)
    except OSError as error:
        raise ConfigError(f"model: {error}") from None
