"""How many threads an instance of a model computes with."""

from __future__ import annotations

from penstock.classic.model_config import ModelConfig
from penstock.engines.host.cores import usable_cores


def instance_count(config: ModelConfig) -> int:
    """Of all groups and GPUs, of a configuration that is complete."""
    return sum(max(1, group.count) * max(1, len(group.gpus)) for group in config.instance_group) or 1


def threads_per_instance(config: ModelConfig) -> int:
    """This process's cores, divided by the model's instances: at least one."""
    return max(1, usable_cores() // instance_count(config))
