"""From settings to a language model: its engine process, its tokenizer, its template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from socket import gethostname
from typing import Any, Literal

import msgspec

from penstock.engines.client.engine import Engine
from penstock.engines.contract.loading import silent
from penstock.engines.contract.messages import StepRecord
from penstock.engines.door.spec import DoorSpec
from penstock.engines.errors import InvalidRequestError
from penstock.engines.formats.exported_graph import exported_graph
from penstock.engines.formats.gguf.files import gguf_files
from penstock.engines.host.gpus import visible_gpus
from penstock.engines.host.placement import Placement, find_place
from penstock.engines.kv_events.settings import KVEventsConfig
from penstock.engines.offload.folder import secret_key
from penstock.engines.process.liveness import Liveness, Watched
from penstock.engines.registry import EngineSpec
from penstock.engines.replicas.state import Replicated
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.queues import Policy
from penstock.gateway.configuration.config import Config, ConfigError
from penstock.gateway.configuration.sections.language_model import (
    OF_OUR_SCHEDULER,
    CacheConfig,
    EngineConfig,
    LanguageModelConfig,
)
from penstock.gateway.front.loading_board import LoadingBoard
from penstock.gateway.llm.adapters import Adapter, AdapterSet, new_adapter, parse_adapters, parse_directory
from penstock.gateway.llm.block_hosts import BLOCK_HOSTS, is_block_host
from penstock.gateway.llm.engine_choice import choose_engine
from penstock.gateway.llm.engine_sharing import attached_engine, door_spec, engine_elsewhere, watchdog_config
from penstock.gateway.llm.handing_over import check_handover
from penstock.gateway.llm.model_metrics import ModelMetrics
from penstock.gateway.llm.model_texts import read_texts, read_tokenizer, text_settings
from penstock.gateway.llm.models import LoadedModel, ModelSource, find_model
from penstock.gateway.memory.budget import MemoryBudget
from penstock.gateway.memory.budgeted_engine import BudgetedEngine
from penstock.tokenizers import Tokenizer

_CPU_BATCHED_TOKENS, _GPU_BATCHED_TOKENS = 512, 4096
"""Steps of so many tokens keep the pause between two tokens of running requests bearable."""


def build_model(
    config: Config,
    source: ModelSource,
    names: Sequence[str] = (),
    budget: MemoryBudget | None = None,
    board: LoadingBoard | None = None,
    new_door: Callable[[], DoorSpec] | None = None,
) -> LoadedModel:
    """A model that is ready to be started: `await model.engine.start()`. Raises ConfigError.

    `budget` is that of all models of a server; None: it has the machine for itself. `board` is told how far it is.
    `new_door`: where other processes of this server use the engine, unless it has a door already.
    """
    about_texts = text_settings(config.model, source)
    tokenizer = read_tokenizer(about_texts)
    names = tuple(names) or public_names(config, source.name)
    observed: list[ModelMetrics] = []
    built: list[LoadedModel] = []

    def on_step(step: StepRecord) -> None:
        observed[0].step(step)

    given = [new_adapter(*each) for each in parse_adapters(config.adapters.lora, names).items()]
    make = partial(_one_engine, config, budget or MemoryBudget(), names, board, on_step)
    engine, adapters = _engine(config, source, names, tokenizer, given, make, on_step, new_door)
    observed.append(
        ModelMetrics(
            names[0],
            stats=lambda: engine.stats,
            ready=lambda: engine.ready,
            asleep=lambda: built[0].sleep.asleep,
            adapters=adapters,
            liveness=_liveness(engine),
            replicas=engine if isinstance(engine, Replicated) else None,
        )
    )
    texts = read_texts(about_texts, tokenizer)
    model = LoadedModel(
        names=names,
        root=source.name,
        engine=engine,
        tokenizer=tokenizer,
        chat_template=texts.chat_template,
        parsers=texts.parsers,
        guard=texts.guard,
        metrics=observed[0],
        default_params=texts.default_params,
        texts=about_texts,
        adapters=adapters,
        max_num_seqs=config.scheduling.max_num_seqs * _engines(config),
        sleep_idle_seconds=config.model.sleep_idle_seconds,
        salt_key=_salt_key(config.cache.kv_offload_dir),
    )
    built.append(model)
    return model


def _engines(config: Config) -> int:
    """That share the model's requests."""
    return max(1, config.replication.replicas + len(config.replication.replica_address))


def _engine(
    config: Config,
    source: ModelSource,
    names: Sequence[str],
    tokenizer: Tokenizer,
    given: Sequence[Adapter],
    make: Callable[[int, EngineSpec, int], BudgetedEngine],
    on_step: Callable[[StepRecord], None],
    new_door: Callable[[], DoorSpec] | None,
) -> tuple[Engine, AdapterSet]:
    """One engine, here or elsewhere, or several that look like one; and the adapters that it has. `make`: see
    `_one_engine`. Raises ConfigError."""
    adapters = AdapterSet()
    elsewhere = engine_elsewhere(config, source)
    if elsewhere is not None:
        return attached_engine(config, *elsewhere, watchdog_config(config.server), on_step, adapters), adapters
    replication = config.replication
    spec = None
    if replication.replicas:
        spec = engine_spec(config, source, tokenizer, given, names)
        if spec.scheduler.kv_events is not None and replication.replica_address:
            raise ConfigError("kv-events: engines elsewhere publish theirs where they are started")
        check_handover(config, spec)
        directory, room = parse_directory(config.adapters.lora_directory), spec.options.get("max_loras", 0)
        adapters = AdapterSet(given, directory=directory, max_loaded=room)
        if replication.replicas == 1 and replication.resume != "on" and not replication.replica_address:
            if new_door is not None and spec.door is None:
                spec = msgspec.structs.replace(spec, door=new_door())
            return make(0, spec, 1), adapters
    from penstock.gateway.llm.replicas import replicated_engine

    return replicated_engine(config, source, spec, make, watchdog_config(config.server), on_step), adapters


def _liveness(engine: Engine) -> Callable[[], Liveness] | None:
    return (lambda: engine.liveness) if isinstance(engine, Watched) else None


def _one_engine(
    config: Config,
    budget: MemoryBudget,
    names: Sequence[str],
    board: LoadingBoard | None,
    on_step: Callable[[StepRecord], None],
    number: int,
    spec: EngineSpec,
    one_of: int,
) -> BudgetedEngine:
    """Number `number` of a model's. The first one tells the board how far it is."""
    return BudgetedEngine(
        budget,
        names[0],
        spec,
        watchdog_config(config.server),
        one_of=one_of,
        log_level=config.server.logging_level,
        on_step=on_step,
        on_loading=silent if board is None or number else board.reporter(names),
    )


def _salt_key(offload_dir: str | None) -> bytes | None:
    """One that later starts have, too: prefixes of tenants are kept like others. None: any."""
    if offload_dir is None:
        return None
    try:
        return secret_key(Path(offload_dir), "salts")
    except (OSError, ValueError) as error:
        raise ConfigError(f"kv-offload-dir: {error}") from None


def public_names(config: Config, source_name: str) -> tuple[str, ...]:
    """Of the model that the command names."""
    return config.model.served_model_name or (source_name,)


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
    options = _OPTIONS[runner](config, source, scheduler, tokenizer) | _adapter_options(config, adapters)
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


_GPU_ENGINES = ("vllm", "tensorrt_llm", "torch")
_OWN_SCHEDULER = ("vllm", "tensorrt_llm", "simulated")
_FOREIGN_ENGINES = ("openvino", "simulated")
_LARGE_ENGINES = ("vllm", "tensorrt_llm")


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


def _openvino_options(
    config: Config, source: ModelSource, scheduler: SchedulerConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    if config.model.device not in ("auto", "cpu"):
        raise ConfigError(f"device: the openvino engine runs on cpu, not on {config.model.device}")
    return _common_options(config, source, scheduler) | {
        "weights": config.model.weights,
        "activations": config.model.activations,
        "weights_cache": config.model.weights_cache,
        "draft_model_dir": _draft_folder(config.model.speculative_model),
        "mtp": config.scheduling.speculative == "mtp",
    }


def _speculative(config: Config) -> Literal["off", "ngram", "draft_model"]:
    """A draft head is a draft model for the scheduler."""
    named = config.scheduling.speculative
    return "draft_model" if named == "mtp" or config.model.speculative_model is not None else named


def _draft_folder(model: str | None) -> str | None:
    """What is on the hub has been downloaded (`fetch_draft_model`)."""
    if model is None:
        return None
    try:
        return str(find_model(model).folder)
    except ConfigError as error:
        raise ConfigError(f"speculative-{error}") from None


def _torch_options(
    config: Config, source: ModelSource, scheduler: SchedulerConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    if config.model.weights != "auto":
        raise ConfigError("weights: the torch engine keeps weights in the precision of the computation (dtype)")
    return _common_options(config, source, scheduler) | {"device": config.model.device}


def _large_options(
    config: Config, source: ModelSource, scheduler: SchedulerConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Of vLLM and TensorRT-LLM."""
    if config.model.weights != "auto":
        raise ConfigError("weights: this engine keeps them as the checkpoint does, or in the precision of dtype")
    if config.model.device != "auto":
        raise ConfigError("device: this engine runs on what it was built for; CUDA_VISIBLE_DEVICES chooses among GPUs")
    return _common_options(config, source, scheduler) | {
        "tensor_parallel_size": config.engine.tensor_parallel_size,
        "pipeline_parallel_size": config.engine.pipeline_parallel_size,
        "memory_share": config.engine.gpu_memory_utilization,
        "quantization": config.engine.quantization,
        "engine_args": _engine_args(config.engine.engine_args),
        "prefix_caching": config.cache.prefix_caching,
    }


def _engine_args(given: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        return msgspec.json.decode(given, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"engine-args: not a JSON object: {error}") from None


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


def _adapter_options(config: Config, adapters: Sequence[Adapter]) -> dict[str, Any]:
    """Room for all that are given, whatever the limit; for none where adapters can neither be given nor come."""
    wanted = bool(adapters or config.adapters.lora_directory)
    return {
        "adapters": {adapter.key: str(adapter.folder) for adapter in adapters},
        "max_loras": max(config.adapters.max_loras, len(adapters)) if wanted else 0,
        "max_lora_rank": config.adapters.max_lora_rank,
    }


def _simulated_options(
    config: Config, source: ModelSource, scheduler: SchedulerConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    options = config.simulated
    first, end = _plain_ids(tokenizer)
    found: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "first_token_id": first,
        "end_token_id": end,
        "faults": options.sim_faults,
        "latency": {
            "per_step": options.sim_step_ms / 1e3,
            "per_prefill_token": options.sim_prefill_us / 1e6,
            "per_sequence": options.sim_sequence_us / 1e6,
        },
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "prefix_caching": config.cache.prefix_caching,
    }
    if config.model.max_model_len is not None:
        found["max_model_len"] = config.model.max_model_len
    if config.cache.num_kv_blocks is not None:
        found["num_blocks"] = config.cache.num_kv_blocks
    return found


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
