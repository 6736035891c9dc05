"""From settings to what an engine process is told: its runner, its scheduler's limits, its options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from socket import gethostname
from typing import Literal

from penstock.engines.errors import InvalidRequestError
from penstock.engines.formats.gguf.files import gguf_files
from penstock.engines.formats.model_files import exported_graph
from penstock.engines.host.gpus import visible_gpus
from penstock.engines.host.placement import Placement, find_place
from penstock.engines.kv_events.settings import KVEventsConfig
from penstock.engines.registry import EngineSpec
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.queues import Policy
from penstock.gateway.configuration.config import Config, ConfigError
from penstock.gateway.configuration.sections.language_model import (
    OF_OUR_SCHEDULER,
    CacheConfig,
    EngineConfig,
    LanguageModelConfig,
)
from penstock.gateway.llm.adapters import Adapter
from penstock.gateway.llm.block_hosts import BLOCK_HOSTS, is_block_host
from penstock.gateway.llm.engine_choice import choose_engine
from penstock.gateway.llm.engine_options import adapter_options, runner_options
from penstock.gateway.llm.engine_sharing import door_spec
from penstock.gateway.llm.models import ModelSource
from penstock.tokenizers import Tokenizer

_CPU_BATCHED_TOKENS, _GPU_BATCHED_TOKENS = 512, 4096
"""Steps of so many tokens keep the pause between two tokens of running requests bearable."""

_GPU_ENGINES = ("vllm", "tensorrt_llm", "torch")
_OWN_SCHEDULER = ("vllm", "tensorrt_llm", "simulated")
_FOREIGN_ENGINES = ("openvino", "simulated")
_LARGE_ENGINES = ("vllm", "tensorrt_llm")


def engine_spec(
    config: Config,
    source: ModelSource,
    tokenizer: Tokenizer,
    adapters: Sequence[Adapter] = (),
    names: Sequence[str] = (),
) -> EngineSpec:
    """What the engine process is told; `adapters` are loaded with the model, `names` are its public ones. Raises
    ConfigError for limits that contradict each other."""
    scheduling = config.scheduling
    runner = _runner(config, source)
    _check_engine_settings(config, runner)
    batched_tokens = scheduling.max_num_batched_tokens or max(_batched_tokens(config, runner), scheduling.max_num_seqs)
    try:
        scheduler = SchedulerConfig(
            max_num_seqs=scheduling.max_num_seqs,
            max_num_batched_tokens=batched_tokens,
            itl_target_ms=scheduling.itl_target_ms,
            steps_in_flight=scheduling.steps_in_flight,
            speculative=_speculative(config),
            max_draft_tokens=scheduling.max_draft_tokens,
            policy=Policy(scheduling.policy),
            ageing_seconds=scheduling.ageing,
            max_queued_requests=scheduling.max_queued_requests,
            max_queued_tokens=scheduling.max_queued_tokens,
            enable_prefix_caching=config.cache.prefix_caching,
            kv_offload_dir=config.cache.kv_offload_dir or "",
            kv_offload_bytes=config.cache.kv_offload_bytes,
            kv_events=_kv_events(config.cache, names[0] if names else source.name),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    options = runner_options(runner, config, source, scheduler, tokenizer) | adapter_options(config, adapters)
    return EngineSpec(
        runner=runner,
        scheduling=scheduling.scheduler,
        options=options,
        scheduler=scheduler,
        publish_interval=config.server.stream_interval_ms / 1e3,
        placement=_placement(config),
        door=door_spec(config, source),
    )


def _kv_events(cache: CacheConfig, model: str) -> KVEventsConfig | None:
    """Raises ValueError."""
    if cache.kv_events is None:
        for name in ("kv_events_replay", "kv_events_topic"):
            if getattr(cache, name) is not None:
                raise ValueError(f"{name.replace('_', '-')}: nothing is published without kv-events")
        return None
    topic = f"kv@{gethostname()}@{model}" if cache.kv_events_topic is None else cache.kv_events_topic
    return KVEventsConfig(endpoint=cache.kv_events, replay=cache.kv_events_replay or "", topic=topic)


def _placement(config: Config) -> Placement:
    """Raises ConfigError for CPUs and nodes that this machine does not have."""
    asked = Placement(config.model.cpus, config.model.numa_nodes)
    try:
        find_place(asked)
    except InvalidRequestError as error:
        raise ConfigError(f"{str(error.param).replace('_', '-')}: {error.message}") from None
    return asked


def _runner(config: Config, source: ModelSource) -> str:
    if config.model.engine != "auto":
        foreign = _foreign_files(source.folder)
        if config.model.engine not in _FOREIGN_ENGINES and foreign is not None:
            raise ConfigError(
                f"engine: the {config.model.engine} engine does not read {foreign}; the openvino engine does"
            )
        return config.model.engine
    return choose_engine(source.folder)


def _foreign_files(folder: Path) -> str | None:
    """What the model is in, where that is not safetensors."""
    if gguf_files(folder):
        return "GGUF files"
    return None if exported_graph(folder) is None else "OpenVINO's graphs"


def _batched_tokens(config: Config, runner: str) -> int:
    on_gpu = runner in _GPU_ENGINES and config.model.device != "cpu" and visible_gpus() > 0
    return _GPU_BATCHED_TOKENS if on_gpu else _CPU_BATCHED_TOKENS


def _check_engine_settings(config: Config, runner: str) -> None:
    """Raises ConfigError for a setting that this engine would not heed."""
    scheduler = config.scheduling.scheduler
    if scheduler == "engine" and runner not in _OWN_SCHEDULER:
        raise ConfigError(f"scheduler: the {runner} engine has no scheduler of its own; penstock's runs it")
    if scheduler == "penstock" and runner == "tensorrt_llm":
        raise ConfigError("scheduler: the tensorrt_llm engine runs under its own scheduler, behind penstock's queue")
    if scheduler == "engine" or runner == "tensorrt_llm":
        for name, default in OF_OUR_SCHEDULER.items():
            if getattr(config.scheduling, name) != default:
                raise ConfigError(f"{name.replace('_', '-')}: does not apply to an engine that uses its own scheduler")
    guesses = config.scheduling.max_draft_tokens
    draft = config.model.speculative_model
    if draft is None and config.scheduling.speculative == "off" and guesses != OF_OUR_SCHEDULER["max_draft_tokens"]:
        raise ConfigError("max-draft-tokens: nothing is guessed without speculative=ngram or mtp, or speculative-model")
    if draft is not None and runner != "openvino":
        raise ConfigError(f"speculative-model: the {runner} engine has no draft models; the openvino engine does")
    if draft is not None and config.scheduling.speculative != "off":
        raise ConfigError("speculative-model: guesses are either those of a draft model or those of speculative")
    if config.scheduling.speculative != "off" and runner == "vllm":
        raise ConfigError(
            "speculative: the vllm engine guesses only under its own scheduler (scheduler=engine, and "
            "speculative_config in engine-args)"
        )
    if config.cache.kv_offload_dir is None:
        if config.cache.kv_offload_bytes != CacheConfig().kv_offload_bytes:
            raise ConfigError("kv-offload-bytes: nothing is kept without kv-offload-dir")
    elif scheduler == "engine":
        raise ConfigError("kv-offload-dir: does not apply to an engine that uses its own scheduler")
    elif not is_block_host(runner):
        raise ConfigError(f"kv-offload-dir: only {BLOCK_HOSTS} have this setting, not {runner}")
    if config.cache.kv_events is not None and (scheduler == "engine" or runner == "tensorrt_llm"):
        raise ConfigError("kv-events: does not apply to an engine that uses its own scheduler")
    if config.scheduling.speculative == "mtp" and runner != "openvino":
        raise ConfigError(f"speculative: the {runner} engine has no mtp; the openvino engine does")
    if runner != "openvino":
        for name in ("activations", "weights_cache"):
            if getattr(config.model, name) != getattr(LanguageModelConfig(), name):
                raise ConfigError(f"{name.replace('_', '-')}: the {runner} engine does not have this setting")
    if runner in _LARGE_ENGINES:
        return
    for name in EngineConfig.__struct_fields__:
        if getattr(config.engine, name) != getattr(EngineConfig(), name):
            raise ConfigError(f"{name.replace('_', '-')}: the {runner} engine does not have this setting")


def _speculative(config: Config) -> Literal["off", "ngram", "draft_model"]:
    """A draft head is a draft model for the scheduler."""
    named = config.scheduling.speculative
    return "draft_model" if named == "mtp" or config.model.speculative_model is not None else named
