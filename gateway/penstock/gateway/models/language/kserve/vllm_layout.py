"""`backend: "vllm"`: Triton's vLLM backend. `model.json` has vLLM's AsyncEngineArgs, `multi_lora.json` the adapters.

Source: triton-inference-server/vllm_backend, src/model.py and docs/llama_multi_lora_tutorial.md.
"""

from __future__ import annotations

import json
from typing import Any

from penstock.classic.base import ModelContext
from penstock.classic.model_config import ModelConfig, ModelInstanceGroup
from penstock.engines.host.gpus import visible_gpus
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.configuration.sections.language_model import ModelSettings
from penstock.gateway.models.language.kserve.folder_layout import (
    beside,
    check_fetching,
    check_one_instance,
    check_parameters,
    check_tokenizer,
    choose,
    model_source,
    precision,
    read_settings,
)
from penstock.gateway.models.language.kserve.vllm_form import VLLM_FORM
from penstock.gateway.models.language.shared_settings import settings_beside

_FILE = "model.json"
_ADAPTERS_FILE = "multi_lora.json"
_SETTINGS = {
    **{
        name: name
        for name in (
            "quantization",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "gpu_memory_utilization",
            "tensor_parallel_size",
            "pipeline_parallel_size",
        )
    },
    "enable_prefix_caching": "prefix_caching",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_kv_blocks",
    "max_num_queued_reqs": "max_queued_requests",
    "max_num_queued_tokens": "max_queued_tokens",
    "scheduling_policy": "policy",
}
"""vLLM's name -> the setting of ours that says the same."""
_OF_ITS_FRONT = (
    *("disable_log_requests", "enable_log_requests", "disable_log_stats", "max_log_len"),
    *("aggregate_engine_logging", "use_tqdm_on_load", "served_model_name"),
)
"""What vLLM's own front logs, and the name it serves: taken, and without effect as in Triton or as the log is ours."""
_AS_HERE = {"tokenizer_mode": "auto", "skip_tokenizer_init": False, "trust_remote_code": False}
"""Settings that say what is so anyway, if they have this value."""
_PARAMETERS = {
    "REPORT_CUSTOM_METRICS": "metrics are always there, under this server's names",
    "ENABLE_VLLM_HEALTH_CHECK": "the engine is always watched, and replaced when it dies",
    "FORCE_CPU_ONLY_INPUT_TENSORS": "inputs are never on a GPU",
    "GPU_DEVICE_IDS": "the GPUs of a KIND_MODEL instance",
}
"""Parameters of config.pbtxt, and how they are met."""
_BOOLS = {"true": True, "false": False}


class VllmLayout:
    form = VLLM_FORM

    def __init__(self, engine: str = "vllm") -> None:
        """`engine`: what runs these models; the operator may have another one run them."""
        self._engine = engine

    def configure(self, defaults: ModelSettings, context: ModelContext) -> ModelSettings:
        """Raises ConfigError."""
        args = read_settings(context.version_folder / _FILE, json.loads, "JSON")
        if args is None:
            raise ConfigError(f"'{_FILE}' containing vllm engine args must be provided in version {context.version}")
        args = {name: _truth(value) for name, value in args.items()}
        args = {name: value for name, value in args.items() if name not in _AS_HERE or value != _AS_HERE[name]}
        check_fetching(args)
        model = model_source(args.pop("model", None), context, _FILE)
        check_tokenizer(args, context, _FILE, model)
        engine = choose(self._engine, "vllm", "vllm")
        settings: dict[str, Any] = {"engine": engine, "model": model, **_adapters(args, context)}
        for name in ("tokenizer", *_OF_ITS_FRONT):
            args.pop(name, None)
        args |= _devices(context.config, args)
        if "dtype" in args:
            settings["dtype"] = precision("dtype", args.pop("dtype"))
        if "kv_cache_dtype" in args:
            settings["kv_cache_dtype"] = _cache_precision(args.pop("kv_cache_dtype"))
        if engine != "vllm":
            _only_common(args, engine)
        settings |= {ours: args.pop(name) for name, ours in _SETTINGS.items() if name in args}
        return settings_beside(defaults, "foreign", settings | ({"engine_args": args} if args else {}))


def _truth(value: object) -> object:
    """Triton's tutorial writes "true" for true."""
    return _BOOLS.get(value.lower(), value) if isinstance(value, str) else value


def _cache_precision(value: object) -> str:
    return "fp8" if value in ("fp8", "fp8_e4m3") else precision("kv_cache_dtype", value)


def _adapters(args: dict[str, Any], context: ModelContext) -> dict[str, Any]:
    """Takes what concerns LoRA out of `args`. As in Triton, adapters are read only where `enable_lora` is true."""
    enabled = args.pop("enable_lora", False)
    room = [args.pop(name) for name in ("max_loras", "max_cpu_loras") if name in args]
    rank = {"max_lora_rank": args.pop("max_lora_rank")} if "max_lora_rank" in args else {}
    if not enabled:
        return {}
    folders = read_settings(context.version_folder / _ADAPTERS_FILE, json.loads, "JSON")
    if folders is None:
        raise ConfigError(f"Triton backend cannot find {_ADAPTERS_FILE} in version {context.version}.")
    for name, path in folders.items():
        if "=" in name or not isinstance(path, str):
            raise ConfigError(f"{_ADAPTERS_FILE}: {name!r} must be a name without '=' for a path")
    if not all(isinstance(count, int) for count in room):
        raise ConfigError("max_loras and max_cpu_loras must be numbers")
    adapters = [f"{name}={beside(path, context.version_folder)}" for name, path in folders.items()]
    # vLLM's max_loras is for one batch and others wait in CPU memory; here it is for all that are loaded
    return {"lora": adapters, "max_loras": max(len(adapters), 1, *room), **rank}


def _devices(config: ModelConfig, args: dict[str, Any]) -> dict[str, Any]:
    """The GPUs that the instance group and GPU_DEVICE_IDS choose, as vLLM's `device_ids`. Raises ConfigError."""
    group = check_one_instance(config)
    parameters = check_parameters(config, _PARAMETERS)
    size = int(args.get("tensor_parallel_size", 1)) * int(args.get("pipeline_parallel_size", 1))
    kind = ModelInstanceGroup.KIND_MODEL if group is None else group.kind
    if kind == ModelInstanceGroup.KIND_GPU:
        if size > 1:
            raise ConfigError(
                "KIND_GPU is currently for single-GPU models, please specify KIND_MODEL in the model's config.pbtxt "
                "for multi-GPU models"
            )
        return {"device_ids": list(group.gpus)} if group is not None else {}
    ids = parameters.get("GPU_DEVICE_IDS", "") if kind == ModelInstanceGroup.KIND_MODEL else ""
    return {"device_ids": _device_ids(ids, size)} if ids else {}


def _device_ids(text: str, size: int) -> list[int]:
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"GPU_DEVICE_IDS: {text!r} is not a comma-separated list of integers") from None
    if min(ids) < 0 or len(set(ids)) < len(ids):
        raise ConfigError(f"GPU_DEVICE_IDS: {text!r} has negative numbers or the same one twice")
    if size > 1 and len(ids) != size:
        raise ConfigError(
            f"GPU_DEVICE_IDS: {len(ids)} of them for a tensor_parallel_size * pipeline_parallel_size of {size}"
        )
    return ids


def _only_common(args: dict[str, Any], engine: str) -> None:
    """Takes out what another engine satisfies anyway. Raises ConfigError for what only vLLM knows."""
    args.pop("enforce_eager", None)  # no other engine captures graphs
    if engine in ("openvino", "simulated") or not visible_gpus():
        args.pop("gpu_memory_utilization", None)  # they take nothing of a GPU
    unknown = args.keys() - _SETTINGS.keys()
    if unknown:
        raise ConfigError(f"{min(unknown)}: only the vllm engine has this setting; backend-config says engine={engine}")
