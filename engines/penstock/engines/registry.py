"""Specifications of engine processes, and the runners that they can choose from."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.engines.autonomous.core import AutonomousCore
from penstock.engines.contract.continuous_batcher import ContinuousBatcher
from penstock.engines.contract.core import Core
from penstock.engines.contract.loading import Loading, Report, silent
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.runner import ModelRunner
from penstock.engines.core import EngineCore
from penstock.engines.door.spec import DoorSpec
from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.host.content_digest import ModelDigests
from penstock.engines.host.placement import Placement
from penstock.engines.scheduler.config import OF_OUR_SCHEDULER, SchedulerConfig

logger = logging.getLogger(__name__)


_SHOWN = ("device", "dtype", "weights", "activations", "kv_cache_dtype")


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a new engine process needs; travels as JSON."""

    runner: str
    """A key of `RUNNERS` or `BATCHERS`."""
    scheduling: Literal["auto", "penstock", "engine"] = "auto"
    """Whose scheduler decides: ours over a ModelRunner, or the engine's own behind our admission queue. auto: ours
    wherever it can."""
    options: dict[str, Any] = {}
    """The runner's configuration."""
    scheduler: SchedulerConfig = SchedulerConfig()
    publish_interval: float = 0.0
    """Seconds; see `process.publisher`."""
    heartbeat_interval: float = 1.0
    """Seconds; see `process.heartbeat`."""
    placement: Placement = Placement()
    """Of the process; who loads a model in a process of its own binds it first."""
    door: DoorSpec | None = None
    """Where others than the owner of its process can use the engine; None: nowhere."""

    @property
    def shown_settings(self) -> dict[str, Any]:
        """Those that an error of loading names."""
        return {"engine": self.runner} | {name: self.options[name] for name in _SHOWN if name in self.options}


class Order(msgspec.Struct, frozen=True):
    """What an engine process is told to do; travels as one line of JSON."""

    address: str
    """Of the gateway's socket."""
    log_level: str
    spec: EngineSpec


def _openvino(options: dict[str, Any], report: Report) -> ModelRunner:
    from penstock.engines.host.memory import parse_memory
    from penstock.engines.openvino.config import OpenVINOConfig
    from penstock.engines.openvino.runner import OpenVINORunner

    memory = options["kv_cache_memory"]
    draft = options.get("draft_model_dir")
    resolved = options | {
        "model_dir": Path(options["model_dir"]),
        "draft_model_dir": None if draft is None else Path(draft),
        "kv_cache_memory": None if memory is None else parse_memory(memory),
    }
    return OpenVINORunner(OpenVINOConfig(**resolved), report)


def import_engine(name: str) -> None:
    """Ahead of its model, what takes long: only openvino's modules do not look at how they are going to be used."""
    if name == "openvino":
        import penstock.engines.openvino.runner  # noqa: F401


def _torch(options: dict[str, Any], report: Report) -> ModelRunner:
    try:
        from penstock.engines.torch.config import TorchConfig
        from penstock.engines.torch.runner import TorchRunner
    except ModuleNotFoundError as e:
        raise EngineError(
            f"the torch runner needs torch and transformers, {e.name} is missing: pip install 'penstock-server[torch]'"
        ) from e
    return TorchRunner(TorchConfig(**options | {"model_dir": Path(options["model_dir"])}), report)


def _simulated(options: dict[str, Any], report: Report) -> ModelRunner:
    from penstock.engines.simulated import SimulatedConfig, SimulatedRunner

    return SimulatedRunner(msgspec.convert(options, SimulatedConfig))


def _vllm(options: dict[str, Any], report: Report) -> ModelRunner:
    from penstock.engines.vllm.loading import load

    report(Loading("vLLM"))
    return load(options)


def _vllm_batcher(options: dict[str, Any], report: Report) -> ContinuousBatcher:
    from penstock.engines.vllm.loading import load_batcher

    report(Loading("vLLM"))
    return load_batcher(options)


def _simulated_batcher(options: dict[str, Any], report: Report) -> ContinuousBatcher:
    from penstock.engines.simulated import OwnThread, SimulatedBatcher, SimulatedBatcherConfig

    config = msgspec.convert(options, SimulatedBatcherConfig)
    batcher = SimulatedBatcher(config)
    return OwnThread(batcher) if config.own_thread else batcher


RUNNERS = {"openvino": _openvino, "simulated": _simulated, "torch": _torch, "vllm": _vllm}
"""Imported when asked for: a process loads only what it runs."""


def _tensorrt_llm(options: dict[str, Any], report: Report) -> ContinuousBatcher:
    from penstock.engines.tensorrt_llm.loading import load

    report(Loading("TensorRT-LLM"))
    return load(options)


BATCHERS: dict[str, Callable[[dict[str, Any], Report], ContinuousBatcher]] = {
    "simulated": _simulated_batcher,
    "tensorrt_llm": _tensorrt_llm,
    "vllm": _vllm_batcher,
}
"""Engines that schedule by themselves. One that is a runner as well does so for models that our scheduler cannot drive,
or when it is told to."""


def load_core(spec: EngineSpec, clock: Callable[[], float], report: Report = silent) -> Core:
    """Loads the model behind the scheduler that the specification asks for.

    Raises ValueError and PenstockError for a configuration that cannot be. A runner that cannot drive a model which the
    engine's own scheduler can run raises UnsupportedError with `scheduler` as its `param`.
    """
    if spec.runner not in RUNNERS.keys() | BATCHERS.keys():
        raise ValueError(f"no engine is called {spec.runner!r}; there are {', '.join(sorted(RUNNERS | BATCHERS))}")
    if spec.scheduling == "penstock" and spec.runner not in RUNNERS:
        raise ValueError(f"the engine {spec.runner} has only a scheduler of its own")
    if spec.scheduling == "engine" and spec.runner not in BATCHERS:
        raise ValueError(f"the engine {spec.runner} has no scheduler of its own")
    if spec.scheduling != "engine" and spec.runner in RUNNERS:
        try:
            runner = load_runner(spec, report)
        except UnsupportedError as error:
            if error.param != "scheduler" or spec.runner not in BATCHERS:
                raise
            if spec.scheduling == "penstock":
                hint = f"{error.message}. Its own scheduler can: --scheduler engine"
                raise UnsupportedError(hint, param=error.param) from error
            if spec.scheduler.speculative != "off":
                raise UnsupportedError(f"--speculative needs Penstock's scheduler: {error.message}") from error
            logger.warning("%s schedules by itself: %s", spec.runner, error.message)
            _tell_unused(spec)
        else:
            return EngineCore(runner, spec.scheduler, clock)
    if spec.scheduler.kv_events is not None:
        raise UnsupportedError(f"--kv-events: {spec.runner} has a KV cache of its own under its own scheduler")
    if spec.scheduler.kv_offload_dir:
        raise UnsupportedError(f"--kv-offload-dir: {spec.runner} has a KV cache of its own under its own scheduler")
    if spec.scheduler.handover is not None:
        raise UnsupportedError(f"--prefill-replicas: {spec.runner} has a KV cache of its own under its own scheduler")
    return AutonomousCore(BATCHERS[spec.runner](spec.options, report), spec.scheduler, clock)


def _tell_unused(spec: EngineSpec) -> None:
    """What the engine's own scheduler does not heed is refused where it is known before the model is loaded."""
    defaults = SchedulerConfig()
    changed = [name for name in OF_OUR_SCHEDULER if getattr(spec.scheduler, name) != getattr(defaults, name)]
    if changed:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        logger.warning("not used by %s's own scheduler: %s", spec.runner, flags)


def load_runner(spec: EngineSpec, report: Report = silent) -> ModelRunner:
    """Loads the model. Raises ValueError for a configuration that the runner does not take."""
    try:
        factory = RUNNERS[spec.runner]
    except KeyError:
        raise ValueError(f"no runner is called {spec.runner!r}; there are {', '.join(sorted(RUNNERS))}") from None
    return factory(spec.options, report)


_OF_THE_MACHINE = {"model_dir", "draft_model_dir", "threads", "num_blocks", "kv_cache_memory", "memory_share"}
_OF_THE_MACHINE |= {"device", "weights_cache", "adapters", "max_loras", "faults", "latency", "max_num_seqs"}
_OF_THE_MACHINE |= {"max_num_batched_tokens", "max_steps_in_flight", "state_interval"}
"""Options of runners that change neither what the tokens are nor how they are hashed."""


def engine_fingerprint(spec: EngineSpec, info: ModelInfo, model: ModelDigests) -> str:
    """Of the model, the engine, its settings and its number types. Engines with the same one give the same greedy
    tokens, as far as their kernels do, and hash the same prompt to the same blocks."""
    options = {name: value for name, value in spec.options.items() if name not in _OF_THE_MACHINE}
    engine = (model, spec.runner, spec.scheduling, options)
    parts = (*engine, info.numerics, info.vocab_size, info.kv_groups, info.eos_token_ids)
    return hashlib.blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=16).hexdigest()
