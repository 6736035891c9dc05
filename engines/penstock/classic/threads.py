"""How many threads an instance of a model computes with."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.classic.model_config import ModelConfig
from penstock.classic.parameters import whole_number
from penstock.engines.host.cores import usable_cores

MAX_THREADS = 1024
"""Of one pool. Libraries end the process when the system has no more threads for them."""


def thread_count(values: Mapping[str, str], key: str) -> int:
    """0 where nothing is said. Raises ValueError that names the key."""
    count = whole_number(values, key)
    if count > MAX_THREADS:
        raise ValueError(f"parameter '{key}' must be at most {MAX_THREADS} threads, not {count}")
    return count


def instance_count(config: ModelConfig) -> int:
    """Of all groups and GPUs, of a configuration that is complete."""
    return sum(max(1, group.count) * max(1, len(group.gpus)) for group in config.instance_group) or 1


def threads_per_instance(config: ModelConfig) -> int:
    """This process's cores, divided by the model's instances: at least one."""
    return max(1, usable_cores() // instance_count(config))
