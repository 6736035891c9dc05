"""From settings to a language model: its engine process, its tokenizer, its template."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from penstock.engines.process import ProcessEngine, WatchdogConfig
from penstock.engines.registry import EngineSpec
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.policy import Policy
from penstock.gateway.config import Config, ConfigError
from penstock.gateway.engine_choice import choose_engine
from penstock.gateway.metrics import ModelMetrics
from penstock.gateway.models import LoadedModel, ModelSource, default_params, load_chat_template
from penstock.tokenizers import Tokenizer, TokenizerError

_DEFAULT_BATCHED_TOKENS = 512
"""A step of this many tokens keeps the pause between two tokens of running requests bearable on a CPU."""


def build_model(config: Config, source: ModelSource, names: Sequence[str] = ()) -> LoadedModel:
    """A model that is ready to be started: `await model.engine.start()`. Raises ConfigError."""
    try:
        tokenizer = Tokenizer(source.folder)
    except TokenizerError as error:
        raise ConfigError(f"model: {error}") from None
    names = tuple(names) or config.model.served_model_name or (source.name,)
    spec = engine_spec(config, source, tokenizer)
    observed: list[ModelMetrics] = []
    engine = ProcessEngine(
        spec,
        WatchdogConfig(timeout=config.server.watchdog_timeout),
        log_level=config.server.logging_level,
        on_step=lambda step: observed[0].step(step),
    )
    observed.append(ModelMetrics(names[0], stats=lambda: engine.stats, ready=lambda: engine.ready))
    return LoadedModel(
        names=names,
        root=source.name,
        engine=engine,
        tokenizer=tokenizer,
        chat_template=load_chat_template(tokenizer, config.model.chat_template),
        metrics=observed[0],
        default_params=default_params(source.folder),
    )


def engine_spec(config: Config, source: ModelSource, tokenizer: Tokenizer) -> EngineSpec:
    """What the engine process is told. Raises ConfigError for limits that contradict each other."""
    scheduling = config.scheduling
    batched_tokens = scheduling.max_num_batched_tokens or max(_DEFAULT_BATCHED_TOKENS, scheduling.max_num_seqs)
    try:
        scheduler = SchedulerConfig(
            max_num_seqs=scheduling.max_num_seqs,
            max_num_batched_tokens=batched_tokens,
            policy=Policy(scheduling.policy),
            ageing_seconds=scheduling.ageing,
            max_queued_requests=scheduling.max_queued_requests,
            max_queued_tokens=scheduling.max_queued_tokens,
            enable_prefix_caching=config.cache.prefix_caching,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    runner = config.model.engine if config.model.engine != "auto" else choose_engine(source.folder)
    if runner == "simulated":
        options = _simulated_options(config, tokenizer)
    elif runner == "torch":
        options = _torch_options(config, source, scheduler)
    elif runner == "vllm":
        options = _vllm_options(config, source, scheduler)
    else:
        options = _openvino_options(config, source, scheduler)
    interval = config.server.stream_interval_ms / 1e3
    return EngineSpec(runner=runner, options=options, scheduler=scheduler, publish_interval=interval)


def _openvino_options(config: Config, source: ModelSource, scheduler: SchedulerConfig) -> dict[str, Any]:
    if config.model.device not in ("auto", "cpu"):
        raise ConfigError(f"device: the openvino engine runs on cpu, not on {config.model.device}")
    return _common_options(config, source, scheduler) | {"weights": config.model.weights}


def _torch_options(config: Config, source: ModelSource, scheduler: SchedulerConfig) -> dict[str, Any]:
    if config.model.weights != "auto":
        raise ConfigError("weights: the torch engine keeps weights in the precision of the computation (dtype)")
    return _common_options(config, source, scheduler) | {"device": config.model.device}


def _vllm_options(config: Config, source: ModelSource, scheduler: SchedulerConfig) -> dict[str, Any]:
    if config.model.weights != "auto":
        raise ConfigError("weights: vLLM keeps them as the checkpoint does, or in the precision of dtype")
    if config.model.device != "auto":
        raise ConfigError("device: vLLM runs on what it was built for; CUDA_VISIBLE_DEVICES chooses among GPUs")
    return _common_options(config, source, scheduler)


def _common_options(config: Config, source: ModelSource, scheduler: SchedulerConfig) -> dict[str, Any]:
    model, cache = config.model, config.cache
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


def _simulated_options(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    options = config.simulated
    first, last = _plain_ids(tokenizer)
    found: dict[str, Any] = {
        "vocab_size": last,
        "first_token_id": first,
        "faults": options.sim_faults,
        "latency": {
            "per_step": options.sim_step_ms / 1e3,
            "per_prefill_token": options.sim_prefill_us / 1e6,
            "per_sequence": options.sim_sequence_us / 1e6,
        },
    }
    if config.model.max_model_len is not None:
        found["max_model_len"] = config.model.max_model_len
    if config.cache.num_kv_blocks is not None:
        found["num_blocks"] = config.cache.num_kv_blocks
    return found


def _plain_ids(tokenizer: Tokenizer) -> tuple[int, int]:
    """The longest range [first, last) of ids without special tokens: what the simulated engine may say."""
    edges = [-1, *sorted(tokenizer.special_ids), tokenizer.vocab_size]
    spans = [(after - before - 1, before + 1, after) for before, after in pairwise(edges)]
    _, first, last = max(spans)
    return first, last
