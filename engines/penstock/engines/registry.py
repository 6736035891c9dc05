"""What an engine process is told to run, and the runners it can choose from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from penstock.engines.base import ModelRunner
from penstock.engines.errors import EngineError
from penstock.engines.scheduler.config import SchedulerConfig


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a new engine process needs; travels as JSON."""

    runner: str
    """A key of `RUNNERS`."""
    options: dict[str, Any] = {}
    """The runner's configuration."""
    scheduler: SchedulerConfig = SchedulerConfig()
    publish_interval: float = 0.0
    """Seconds; see `process.publisher`."""


def _openvino(options: dict[str, Any]) -> ModelRunner:
    from penstock.engines.memory import parse_memory
    from penstock.engines.openvino.config import OpenVINOConfig
    from penstock.engines.openvino.runner import OpenVINORunner

    memory = options["kv_cache_memory"]
    resolved = options | {
        "model_dir": Path(options["model_dir"]),
        "kv_cache_memory": None if memory is None else parse_memory(memory),
    }
    return OpenVINORunner(OpenVINOConfig(**resolved))


def _torch(options: dict[str, Any]) -> ModelRunner:
    try:
        from penstock.engines.torch.config import TorchConfig
        from penstock.engines.torch.runner import TorchRunner
    except ModuleNotFoundError as e:
        raise EngineError(f"the torch runner needs torch and transformers, {e.name} is missing: penstock[torch]") from e
    return TorchRunner(TorchConfig(**options | {"model_dir": Path(options["model_dir"])}))


def _simulated(options: dict[str, Any]) -> ModelRunner:
    from penstock.engines.simulated import SimulatedConfig, SimulatedRunner

    return SimulatedRunner(msgspec.convert(options, SimulatedConfig))


def _vllm(options: dict[str, Any]) -> ModelRunner:
    from penstock.engines.vllm.loading import load

    return load(options)


RUNNERS = {"openvino": _openvino, "simulated": _simulated, "torch": _torch, "vllm": _vllm}
"""Imported when asked for: a process loads only what it runs."""


def load_runner(spec: EngineSpec) -> ModelRunner:
    """Loads the model. Raises ValueError for a configuration that the runner does not take."""
    try:
        factory = RUNNERS[spec.runner]
    except KeyError:
        raise ValueError(f"no runner is called {spec.runner!r}; there are {', '.join(sorted(RUNNERS))}") from None
    return factory(spec.options)
