"""Specs of engine processes, from settings: which engine, its runner, its scheduler's limits, its options."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from socket import gethostname
from typing import Any, Literal

import msgspec

from penstock.engines.errors import EngineError, InvalidRequestError, PenstockError
from penstock.engines.formats.gguf.files import gguf_files
from penstock.engines.formats.model_files import exported_graph, read_json
from penstock.engines.host.gpus import visible_gpus
from penstock.engines.host.placement import Placement, find_place
from penstock.engines.kv_events.settings import KVEventsConfig
from penstock.engines.openvino.families import parse_config
from penstock.engines.registry import EngineSpec
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.queues import Policy
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.configuration.sections.language_model import (
    OF_OUR_SCHEDULER,
    CacheConfig,
    EngineConfig,
    LanguageModelConfig,
    ModelSettings,
)
from penstock.gateway.models.language.adapters import Adapter
from penstock.gateway.models.language.engine_sharing import BLOCK_HOSTS, door_spec, is_block_host
from penstock.gateway.models.language.models import ModelSource, find_model
from penstock.tokenizers import Tokenizer

logger = logging.getLogger("penstock")


def choose_engine(folder: Path) -> str:
    """With a GPU vllm or torch, as installed; on a CPU openvino, and torch for the architectures that it does not have.
    GGUF files and OpenVINO's own are openvino's everywhere, quantized checkpoints wherever vllm is not.

    Raises ConfigError when the folder has no readable config.json, and when torch would be needed and is not there, or
    would refuse the model, too.
    """
    if gguf_files(folder):
        refusal = _openvino_refusal(_read_settings(folder))
        if refusal is not None:
            raise ConfigError(f"model: {refusal}; no other engine reads GGUF files")
        return "openvino"
    if exported_graph(folder) is not None:
        return "openvino"
    if visible_gpus() and find_spec("vllm") is not None:
        return "vllm"
    settings = _read_settings(folder)
    is_quantized = bool(settings.get("quantization_config"))
    has_torch = find_spec("torch") is not None and find_spec("transformers") is not None
    if visible_gpus() and has_torch and not is_quantized:
        return "torch"
    refusal = _openvino_refusal(settings)
    if refusal is None:
        return "openvino"
    if is_quantized:
        raise ConfigError(f"model: {refusal}; torch runs no quantized checkpoints, vllm may (--engine vllm)")
    if not has_torch:
        raise ConfigError(f"model: {refusal}; the torch engine may run it: pip install 'penstock-server[torch]'")
    logger.info("engine torch: openvino does not run this model: %s", refusal)
    return "torch"


def _read_settings(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / "config.json")
    except EngineError as error:
        raise ConfigError(f"model: {error.message}") from None


def _openvino_refusal(settings: dict[str, Any]) -> str | None:
    try:
        parse_config(settings)
    except PenstockError as error:
        return error.message
    return None


def _openvino_options(
    settings: ModelSettings, source: ModelSource, scheduler: SchedulerConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    if settings.model.device not in ("auto", "cpu"):
        raise ConfigError(f"device: the openvino engine runs on cpu, not on {settings.model.device}")
    return _common_options(settings, source, scheduler) | {
        "weights": settings.model.weights,
        "activations": settings.model.activations,
        "weights_cache": settings.model.weights_cache,
        "draft_model_dir": _draft_folder(settings.model.speculative_model),
        "mtp": settings.scheduling.speculative == "mtp",
        "state_interval": settings.cache.state_interval,
    }


def _draft_folder(model: str | None) -> str | None:
    """What is on the hub has been downloaded (`fetch_draft_model`)."""
    if model is None:
        return None
    try:
        return str(find_model(model).folder)
    except ConfigError as error:
        raise ConfigError(f"speculative-{error}") from None


def _torch_options(
    settings: ModelSettings, source: ModelSource, scheduler: SchedulerConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    if settings.model.weights != "auto":
        raise ConfigError("weights: the torch engine keeps weights in the precision of the computation (dtype)")
    return _common_options(settings, source, scheduler) | {
        "device": settings.model.device,
        "state_interval": settings.cache.state_interval,
    }


def _large_options(
    settings: ModelSettings, source: ModelSource, scheduler: SchedulerConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Of vLLM and TensorRT-LLM."""
    if settings.model.weights != "auto":
        raise ConfigError("weights: this engine keeps them as the checkpoint does, or in the precision of dtype")
    if settings.model.device != "auto":
        raise ConfigError("device: this engine runs on what it was built for; CUDA_VISIBLE_DEVICES chooses among GPUs")
    return _common_options(settings, source, scheduler) | {
        "tensor_parallel_size": settings.engine.tensor_parallel_size,
        "pipeline_parallel_size": settings.engine.pipeline_parallel_size,
        "memory_share": settings.engine.gpu_memory_utilization,
        "quantization": settings.engine.quantization,
        "engine_args": _engine_args(settings.engine.engine_args),
        "prefix_caching": settings.cache.prefix_caching,
    }


def _engine_args(arguments: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"engine-args: not a JSON object: {error}") from None


def _common_options(settings: ModelSettings, source: ModelSource, scheduler: SchedulerConfig) -> dict[str, Any]:
    model, cache = settings.model, settings.cache
    return {
        "model_dir": str(source.folder),
        "dtype": model.dtype,
        "kv_cache_dtype": model.kv_cache_dtype,
        "threads": model.threads,
        "max_model_len": model.max_model_len,
        "num_blocks": cache.num_kv_blocks,
        "kv_cache_memory": None if cache.kv_cache_memory is None else str(cache.kv_cache_memory),
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
    }


def adapter_options(settings: ModelSettings, adapters: Sequence[Adapter]) -> dict[str, Any]:
    """Room for all that are given, whatever the limit; for none where adapters can neither be given nor come."""
    adaptable = bool(adapters or settings.adapters.lora_directory)
    return {
        "adapters": {adapter.key: str(adapter.folder) for adapter in adapters},
        "max_loras": max(settings.adapters.max_loras, len(adapters)) if adaptable else 0,
        "max_lora_rank": settings.adapters.max_lora_rank,
    }


def _simulated_options(
    settings: ModelSettings, source: ModelSource, scheduler: SchedulerConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    simulated = settings.simulated
    first, end = _plain_ids(tokenizer)
    options: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "first_token_id": first,
        "end_token_id": end,
        "faults": simulated.sim_faults,
        "latency": {
            "per_step": simulated.sim_step_ms / 1e3,
            "per_prefill_token": simulated.sim_prefill_us / 1e6,
            "per_sequence": simulated.sim_sequence_us / 1e6,
        },
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "prefix_caching": settings.cache.prefix_caching,
    }
    if settings.model.max_model_len is not None:
        options["max_model_len"] = settings.model.max_model_len
    if settings.cache.num_kv_blocks is not None:
        options["num_blocks"] = settings.cache.num_kv_blocks
    return options


def _plain_ids(tokenizer: Tokenizer) -> tuple[int, int]:
    """The longest range [first, end) of ids without special tokens: what the simulated engine may say."""
    edges = [-1, *sorted(tokenizer.special_ids), tokenizer.vocab_size]
    spans = [(after - before - 1, before + 1, after) for before, after in pairwise(edges)]
    _, first, end = max(spans)
    return first, end


_OPTIONS = {
    "openvino": _openvino_options,
    "simulated": _simulated_options,
    "tensorrt_llm": _large_options,
    "torch": _torch_options,
    "vllm": _large_options,
}


def runner_options(
    runner: str, settings: ModelSettings, source: ModelSource, scheduler: SchedulerConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    """`EngineSpec.options` without adapters. Raises ConfigError for settings that this runner would not heed."""
    return _OPTIONS[runner](settings, source, scheduler, tokenizer)


_CPU_BATCHED_TOKENS, _GPU_BATCHED_TOKENS = 512, 4096
"""Steps of so many tokens keep the pause between two tokens of running requests bearable."""

_GPU_ENGINES = ("vllm", "tensorrt_llm", "torch")
_OWN_SCHEDULER = ("vllm", "tensorrt_llm", "simulated")
_FOREIGN_ENGINES = ("openvino", "simulated")
_LARGE_ENGINES = ("vllm", "tensorrt_llm")


def engine_spec(
    settings: ModelSettings,
    source: ModelSource,
    tokenizer: Tokenizer,
    adapters: Sequence[Adapter] = (),
    names: Sequence[str] = (),
    *,
    publish_interval: float = 0.0,
) -> EngineSpec:
    """What the engine process is told; `adapters` are loaded with the model, `names` are its public ones, and
    `publish_interval` is the server's `stream_interval_ms`, in seconds. Raises ConfigError for limits that contradict
    each other."""
    scheduling = settings.scheduling
    runner = _runner(settings, source)
    _check_engine_settings(settings, runner)
    batched_tokens = scheduling.max_num_batched_tokens or max(
        _batched_tokens(settings, runner), scheduling.max_num_seqs
    )
    try:
        scheduler = SchedulerConfig(
            max_num_seqs=scheduling.max_num_seqs,
            max_num_batched_tokens=batched_tokens,
            itl_target_ms=scheduling.itl_target_ms,
            steps_in_flight=scheduling.steps_in_flight,
            speculative=_speculative(settings),
            max_draft_tokens=scheduling.max_draft_tokens,
            policy=Policy(scheduling.policy),
            ageing_seconds=scheduling.ageing,
            max_queued_requests=scheduling.max_queued_requests,
            max_queued_tokens=scheduling.max_queued_tokens,
            enable_prefix_caching=settings.cache.prefix_caching,
            kv_offload_dir=settings.cache.kv_offload_dir or "",
            kv_offload_bytes=settings.cache.kv_offload_bytes,
            kv_events=_kv_events(settings.cache, names[0] if names else source.name),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    options = runner_options(runner, settings, source, scheduler, tokenizer) | adapter_options(settings, adapters)
    return EngineSpec(
        runner=runner,
        scheduling=scheduling.scheduler,
        options=options,
        scheduler=scheduler,
        publish_interval=publish_interval,
        placement=_placement(settings),
        door=door_spec(settings, source),
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


def _placement(settings: ModelSettings) -> Placement:
    """Raises ConfigError for CPUs and nodes that this machine does not have."""
    placement = Placement(settings.model.cpus, settings.model.numa_nodes)
    try:
        find_place(placement)
    except InvalidRequestError as error:
        raise ConfigError(f"{str(error.param).replace('_', '-')}: {error.message}") from None
    return placement


def _runner(settings: ModelSettings, source: ModelSource) -> str:
    if settings.model.engine != "auto":
        foreign = _foreign_files(source.folder)
        if settings.model.engine not in _FOREIGN_ENGINES and foreign is not None:
            raise ConfigError(
                f"engine: the {settings.model.engine} engine does not read {foreign}; the openvino engine does"
            )
        return settings.model.engine
    return choose_engine(source.folder)


def _foreign_files(folder: Path) -> str | None:
    """What the model is in, where that is not safetensors."""
    if gguf_files(folder):
        return "GGUF files"
    return None if exported_graph(folder) is None else "OpenVINO's graphs"


def _batched_tokens(settings: ModelSettings, runner: str) -> int:
    on_gpu = runner in _GPU_ENGINES and settings.model.device != "cpu" and visible_gpus() > 0
    return _GPU_BATCHED_TOKENS if on_gpu else _CPU_BATCHED_TOKENS


def _check_engine_settings(settings: ModelSettings, runner: str) -> None:
    """Raises ConfigError for a setting that this engine would not heed."""
    scheduler = settings.scheduling.scheduler
    if scheduler == "engine" and runner not in _OWN_SCHEDULER:
        raise ConfigError(f"scheduler: the {runner} engine has no scheduler of its own; penstock's runs it")
    if scheduler == "penstock" and runner == "tensorrt_llm":
        raise ConfigError("scheduler: the tensorrt_llm engine runs under its own scheduler, behind penstock's queue")
    if scheduler == "engine" or runner == "tensorrt_llm":
        for name, default in OF_OUR_SCHEDULER.items():
            if getattr(settings.scheduling, name) != default:
                raise ConfigError(f"{name.replace('_', '-')}: does not apply to an engine that uses its own scheduler")
    guesses = settings.scheduling.max_draft_tokens
    draft = settings.model.speculative_model
    if draft is None and settings.scheduling.speculative == "off" and guesses != OF_OUR_SCHEDULER["max_draft_tokens"]:
        raise ConfigError("max-draft-tokens: nothing is guessed without speculative=ngram or mtp, or speculative-model")
    if draft is not None and runner != "openvino":
        raise ConfigError(f"speculative-model: the {runner} engine has no draft models; the openvino engine does")
    if draft is not None and settings.scheduling.speculative != "off":
        raise ConfigError("speculative-model: guesses are either those of a draft model or those of speculative")
    if settings.scheduling.speculative != "off" and runner == "vllm":
        raise ConfigError(
            "speculative: the vllm engine guesses only under its own scheduler (scheduler=engine, and "
            "speculative_config in engine-args)"
        )
    if settings.cache.kv_offload_dir is None:
        if settings.cache.kv_offload_bytes != CacheConfig().kv_offload_bytes:
            raise ConfigError("kv-offload-bytes: nothing is kept without kv-offload-dir")
    elif scheduler == "engine":
        raise ConfigError("kv-offload-dir: does not apply to an engine that uses its own scheduler")
    elif not is_block_host(runner):
        raise ConfigError(f"kv-offload-dir: only {BLOCK_HOSTS} have this setting, not {runner}")
    if settings.cache.kv_events is not None and (scheduler == "engine" or runner == "tensorrt_llm"):
        raise ConfigError("kv-events: does not apply to an engine that uses its own scheduler")
    if settings.scheduling.speculative == "mtp" and runner != "openvino":
        raise ConfigError(f"speculative: the {runner} engine has no mtp; the openvino engine does")
    if runner != "openvino":
        for name in ("activations", "weights_cache"):
            if getattr(settings.model, name) != getattr(LanguageModelConfig(), name):
                raise ConfigError(f"{name.replace('_', '-')}: the {runner} engine does not have this setting")
    if runner not in ("openvino", "torch") and settings.cache.state_interval is not None:
        raise ConfigError(f"state-interval: the {runner} engine does not have this setting")
    if runner in _LARGE_ENGINES:
        return
    for name in EngineConfig.__struct_fields__:
        if getattr(settings.engine, name) != getattr(EngineConfig(), name):
            raise ConfigError(f"{name.replace('_', '-')}: the {runner} engine does not have this setting")


def _speculative(settings: ModelSettings) -> Literal["off", "ngram", "draft_model"]:
    """A draft head is a draft model for the scheduler."""
    named = settings.scheduling.speculative
    return "draft_model" if named == "mtp" or settings.model.speculative_model is not None else named
