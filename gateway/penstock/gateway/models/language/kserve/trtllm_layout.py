"""`backend: "tensorrtllm"`: the LLM API layout of NVIDIA's Triton backend. `model.yaml` has LLM's arguments.

Source: NVIDIA/TensorRT-LLM, triton_backend/all_models/llmapi/tensorrt_llm. There the backend is `python` with a
model.py of its own, which stays what it is here: a Python model that needs tensorrt_llm in its process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from penstock.classic.base import ModelContext
from penstock.classic.model_config import ModelInstanceGroup
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
from penstock.gateway.models.language.kserve.trtllm_form import TRTLLM_FORM
from penstock.gateway.models.language.shared_settings import settings_beside

_FILE = "model.yaml"
_SETTINGS = {
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "max_batch_size": "max_num_seqs",
    "max_num_tokens": "max_num_batched_tokens",
    "max_seq_len": "max_model_len",
}
"""TensorRT-LLM's name -> the setting of ours that says the same."""
_CACHE_SETTINGS = {
    "enable_block_reuse": "prefix_caching",
    "free_gpu_memory_fraction": "gpu_memory_utilization",
    "max_gpu_total_bytes": "kv_cache_memory",
}
"""The same within kv_cache_config."""
_TOKENS_PER_BLOCK = 32
"""TensorRT-LLM's default."""
_AS_HERE = {"backend": "pytorch", "tokenizer_mode": "auto", "skip_tokenizer_init": False, "trust_remote_code": False}
"""Settings that say what is so anyway, if they have this value."""
_REFUSED = {
    "backend": "only pytorch: TensorRT engines are not served, the model's Hugging Face folder is",
    "tokenizer_mode": "prompts are tokenized by this server",
    "skip_tokenizer_init": "prompts are tokenized by this server",
    "logits_post_processors": "they name code; requests cannot bring or choose any",
}
_TRITON = {"max_batch_size": 0, "decoupled": None, "cancellation_check_period_ms": None, "multimodal": False}
"""Of triton_config: the value that it must have; None: any. Models are decoupled here and requests cancelled at once,
whatever it says, and a request that does not stream has exactly one response either way."""
_PARAMETERS = {"FORCE_CPU_ONLY_INPUT_TENSORS": "inputs are never on a GPU"}
_ENGINE_SUFFIX = ".engine"


class TrtllmLayout:
    form = TRTLLM_FORM

    def __init__(self, engine: str = "tensorrt_llm") -> None:
        """`engine`: what runs these models; the operator may have another one run them."""
        self._engine = engine

    def configure(self, defaults: ModelSettings, context: ModelContext) -> ModelSettings:
        """Raises ConfigError."""
        _check_config(context)
        args = read_settings(context.version_folder / _FILE, yaml.safe_load, "YAML")
        if args is None:
            raise ConfigError(f"'{_FILE}' containing TRT-LLM engine args not found in version {context.version}")
        args = {name: value for name, value in args.items() if name not in _AS_HERE or value != _AS_HERE[name]}
        _check_triton(args.pop("triton_config", {}))
        for name, reason in _REFUSED.items():
            if args.get(name):
                raise ConfigError(f"{name}: {reason}")
        check_fetching(args)
        model = model_source(args.pop("model", None), context, _FILE)
        _check_no_engine(Path(model))
        check_tokenizer(args, context, _FILE, model)
        args.pop("tokenizer", None)
        engine = choose(self._engine, "tensorrt_llm", "tensorrt_llm")
        settings: dict[str, Any] = {
            "engine": engine,
            "model": model,
            **_adapters(args, context),
            **_cache(args),
        }
        if "dtype" in args:
            settings["dtype"] = precision("dtype", args.pop("dtype"))
        settings |= {ours: args.pop(name) for name, ours in _SETTINGS.items() if name in args}
        if engine != "tensorrt_llm":
            _only_common(args, settings, engine)
        return settings_beside(defaults, "foreign", settings | ({"engine_args": args} if args else {}))


def _check_config(context: ModelContext) -> None:
    group = check_one_instance(context.config)
    if group is not None and group.kind == ModelInstanceGroup.KIND_GPU:
        raise ConfigError("instance_group: TensorRT-LLM takes the GPUs itself: KIND_MODEL (or KIND_CPU) is expected")
    check_parameters(context.config, _PARAMETERS)


def _check_triton(args: object) -> None:
    if not isinstance(args, dict):
        raise ConfigError("triton_config must be an object")
    for name, value in args.items():
        if name not in _TRITON:
            raise ConfigError(f"triton_config: {name!r} is not one of {', '.join(_TRITON)}")
        expected = _TRITON[name]
        if expected is not None and value and value != expected:
            raise ConfigError(f"triton_config: {name} must be {expected}, as in NVIDIA's layout for text")


def _check_no_engine(model: Path) -> None:
    if model.is_dir() and any(entry.suffix == _ENGINE_SUFFIX for entry in model.iterdir()):
        raise ConfigError("model: a folder of TensorRT engines, which are not served; name the Hugging Face model")


def _adapters(args: dict[str, Any], context: ModelContext) -> dict[str, Any]:
    """Takes what concerns LoRA out of `args`. The adapters of `lora_dir` are known by their folders' names."""
    enabled = args.pop("enable_lora", "lora_config" in args)
    lora = args.pop("lora_config", {})
    if not enabled:
        return {}
    if not isinstance(lora, dict):
        raise ConfigError("lora_config must be an object")
    lora = {name: value for name, value in lora.items() if value is not None}
    folders = lora.pop("lora_dir", [])
    lora.pop("lora_target_modules", None)  # the adapters' own files say which
    room = [lora.pop(name) for name in ("max_loras", "max_cpu_loras") if name in lora]
    rank = {"max_lora_rank": lora.pop("max_lora_rank")} if "max_lora_rank" in lora else {}
    if lora:
        raise ConfigError(f"lora_config: {min(lora)!r} is not supported; adapters are served from their PEFT folders")
    if not isinstance(folders, list) or not folders or not all(isinstance(folder, str) for folder in folders):
        raise ConfigError("lora_config: lora_dir must list the adapters' folders: requests choose one by its name")
    if not all(isinstance(count, int) for count in room):
        raise ConfigError("lora_config: max_loras and max_cpu_loras must be numbers")
    adapters = [f"{Path(folder).name}={beside(folder, context.version_folder)}" for folder in folders]
    return {"lora": adapters, "max_loras": max(len(adapters), *room, 1), **rank}


def _cache(args: dict[str, Any]) -> dict[str, Any]:
    """Takes what our settings say, too, out of kv_cache_config; what is left stays for the engine."""
    cache = args.pop("kv_cache_config", {})
    if not isinstance(cache, dict):
        raise ConfigError("kv_cache_config must be an object")
    cache = {name: value for name, value in cache.items() if value is not None}
    settings = {ours: cache.pop(name) for name, ours in _CACHE_SETTINGS.items() if name in cache}
    if "dtype" in cache:
        value = cache.pop("dtype")
        settings["kv_cache_dtype"] = "fp8" if value == "fp8" else precision("kv_cache_config: dtype", value)
    if "max_tokens" in cache:
        tokens, size = cache.pop("max_tokens"), cache.get("tokens_per_block", _TOKENS_PER_BLOCK)
        if not isinstance(tokens, int) or not isinstance(size, int) or not 0 < size <= tokens:
            raise ConfigError("kv_cache_config: max_tokens must be a number of at least tokens_per_block")
        settings["num_kv_blocks"] = tokens // size
    if cache:
        args["kv_cache_config"] = cache
    return settings


def _only_common(args: dict[str, Any], settings: dict[str, Any], engine: str) -> None:
    """Raises ConfigError for what only TensorRT-LLM knows."""
    if engine in ("openvino", "simulated"):
        settings.pop("gpu_memory_utilization", None)  # they take nothing of a GPU
    if args:
        raise ConfigError(
            f"{min(args)}: only the tensorrt_llm engine has this setting, and backend-config says engine={engine}"
        )
