"""The strings in a model's `parameters` and a backend's options, read as what they mean: flags, numbers, threads."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from penstock.classic.model_config import ModelConfig
from penstock.engines.host.cores import usable_cores

_BOOLS = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}


def strings(config: ModelConfig) -> dict[str, str]:
    """The model's `parameters`."""
    return {key: value.string_value for key, value in config.parameters.items()}


FOR_ALL_BACKENDS = frozenset({"default-max-batch-size"})
"""Options that `--backend-config=<key>=<value>` gives to every backend, whether it has a use for them or not."""


def check_options(backend: str, options: Iterable[str], known: Collection[str] = ()) -> None:
    """Raises ValueError for an option of `--backend-config` that the backend does not know."""
    if unknown := sorted(set(options).difference(known, FOR_ALL_BACKENDS)):
        raise ValueError(f"the {backend} backend has no option '{unknown[0][:64]}'")


def whole_number(values: Mapping[str, str], key: str, default: int = 0) -> int:
    """At least 0. Raises ValueError that names the key."""
    text = values.get(key, str(default))
    if not text.strip().isdecimal():
        raise ValueError(f"parameter '{key}' must be a whole number, not '{text[:100]}'")
    return int(text)


def number(values: Mapping[str, str], key: str, default: float) -> float:
    """Finite. Raises ValueError that names the key."""
    text = values.get(key, str(default))
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"parameter '{key}' must be a number, not '{text[:100]}'")
    return value


def flag(values: Mapping[str, str], key: str, default: bool) -> bool:
    """0, 1, true, false and the like. Raises ValueError that names the key."""
    if key not in values:
        return default
    value = _BOOLS.get(values[key].strip().lower())
    if value is None:
        raise ValueError(f"parameter '{key}' must be 0 or 1, not '{values[key][:100]}'")
    return value


def choice(values: Mapping[str, str], key: str, choices: Mapping[str, str]) -> str:
    """What the value stands for in `choices`. Raises ValueError that names the key."""
    value = choices.get(values[key].strip())
    if value is None:
        raise ValueError(f"parameter '{key}' must be one of {', '.join(choices)}, not '{values[key][:100]}'")
    return value


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
