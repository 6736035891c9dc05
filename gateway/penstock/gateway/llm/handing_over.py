"""From settings to replicas of which some compute prompts for the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.engines.registry import EngineSpec
from penstock.gateway.configuration.config import Config, ConfigError
from penstock.gateway.configuration.sections.language_model import ReplicaConfig
from penstock.gateway.llm.block_hosts import BLOCK_HOSTS, is_block_host

if TYPE_CHECKING:
    from penstock.engines.handover.memory import HandoverMemory


def check_handover(config: Config, spec: EngineSpec | None) -> None:
    """Raises ConfigError where no blocks can be handed over, or nothing asks for it."""
    given, none = config.replication, ReplicaConfig()
    if not given.prefill_replicas:
        for name in ("handover_bytes", "handover_min_tokens"):
            if getattr(given, name) != getattr(none, name):
                raise ConfigError(f"{name.replace('_', '-')}: nothing is handed over without prefill-replicas")
        return
    if given.replica_address or spec is None:
        raise ConfigError("prefill-replicas: blocks are handed over on one machine, so replica-address does not fit")
    if not is_block_host(spec.runner):
        raise ConfigError(f"prefill-replicas: only {BLOCK_HOSTS} hand blocks over, not {spec.runner}")
    if spec.scheduling == "engine":
        raise ConfigError("prefill-replicas: does not apply to an engine that uses its own scheduler")
    if given.prefill_replicas >= given.replicas:
        raise ConfigError(
            f"prefill-replicas: {given.prefill_replicas} of {given.replicas} replicas leave none that generates"
        )
    if given.resume == "off":
        raise ConfigError("prefill-replicas: a request goes on at another replica, so resume cannot be off")
    if not config.cache.prefix_caching:
        raise ConfigError("prefill-replicas: blocks are found by way of the prefix cache, so prefix-caching must be on")
    if config.cache.kv_offload_dir is not None:
        raise ConfigError("prefill-replicas: blocks come from shared memory or from kv-offload-dir, not from both")


def handover_memory(config: Config) -> HandoverMemory | None:
    """None: nothing is handed over. Raises ConfigError."""
    given = config.replication
    if not given.prefill_replicas:
        return None
    from penstock.engines.handover.memory import HandoverMemory  # few have it

    try:
        return HandoverMemory(given.prefill_replicas, given.handover_bytes)
    except OSError as error:
        raise ConfigError(f"prefill-replicas: no shared memory: {error}") from error


def sharing(spec: EngineSpec, memory: HandoverMemory, number: int, num_prefill: int) -> EngineSpec:
    """Replica `number`: the first ones write what they compute, all read."""
    handover = memory.config(number if number < num_prefill else None)
    return msgspec.structs.replace(spec, scheduler=msgspec.structs.replace(spec.scheduler, handover=handover))
