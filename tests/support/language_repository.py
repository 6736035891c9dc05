"""Models of Triton's vLLM and TensorRT-LLM backends, written as their samples are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import yaml
from google.protobuf import text_format

from penstock.classic.base import Host, ModelContext
from penstock.classic.model_config import ModelConfig

VLLM_CONFIG = """
name: "vllm_model"
backend: "vllm"
max_batch_size: 0
model_transaction_policy { decoupled: True }
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] },
  { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true }
]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_MODEL } ]
"""
VLLM_ARGUMENTS: dict[str, Any] = {
    "disable_log_requests": True,
    "gpu_memory_utilization": 0.5,
    "enforce_eager": True,
    "disable_log_stats": False,
}
"""Of the sample's model.json, beside the model."""

_TRTLLM_INPUTS = {
    "image_url": ("STRING", -1),
    "streaming": ("BOOL", 1),
    **{f"sampling_param_{name}": ("INT32", 1) for name in ("best_of", "top_k", "max_tokens")},
    **{
        f"sampling_param_{name}": ("FP32", 1)
        for name in ("temperature", "top_p", "frequency_penalty", "presence_penalty")
    },
    "sampling_param_stop": ("STRING", -1),
    "sampling_param_seed": ("UINT64", 1),
    "sampling_param_exclude_input_from_output": ("BOOL", 1),
    "sampling_param_return_perf_metrics": ("BOOL", 1),
    "return_finish_reason": ("BOOL", 1),
    "return_stop_reason": ("BOOL", 1),
    "return_cumulative_logprob": ("BOOL", 1),
    "stop": ("BOOL", 1),
    "lora_id": ("UINT64", 1),
    "lora_name": ("STRING", 1),
    "lora_path": ("STRING", 1),
    "lora_ckpt_source": ("STRING", 1),
}
_TRTLLM_OUTPUTS = {
    "text_output": ("STRING", -1),
    "finish_reason": ("STRING", -1),
    "stop_reason": ("STRING", -1),
    "cumulative_logprob": ("FP32", -1),
    **{
        f"kv_cache_{name}": ("INT32", -1)
        for name in ("reused_block", "missed_block", "alloc_new_blocks", "alloc_total_blocks")
    },
    "kv_cache_hit_rate": ("FP32", -1),
    **{f"{name}_time_ns": ("INT64", 1) for name in ("arrival", "first_scheduled", "first_token", "last_token")},
    "acceptance_rate": ("FP32", 1),
    "total_accepted_draft_tokens": ("INT32", 1),
    "total_draft_tokens": ("INT32", 1),
}
TRTLLM_CONFIG = "\n".join(
    [
        'name: "tensorrt_llm"\nbackend: "tensorrtllm"\ninstance_group [ { count: 1 kind : KIND_CPU } ]',
        'input { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] }',
        *(
            f'input {{ name: "{name}" data_type: TYPE_{datatype} dims: [ {dim} ] optional: true }}'
            for name, (datatype, dim) in _TRTLLM_INPUTS.items()
        ),
        *(
            f'output {{ name: "{name}" data_type: TYPE_{datatype} dims: [ {dim} ] }}'
            for name, (datatype, dim) in _TRTLLM_OUTPUTS.items()
        ),
    ]
)
TRTLLM_ARGUMENTS: dict[str, Any] = {
    "backend": "pytorch",
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "triton_config": {"max_batch_size": 0, "decoupled": False},
}
"""Of NVIDIA's model.yaml, beside the model."""


def write_vllm(repository: Path, name: str, model: str, arguments: dict[str, Any] | None = None) -> Path:
    """A model as in vllm_backend's samples; returns its version folder."""
    version = _version(repository, name, VLLM_CONFIG.replace("vllm_model", name))
    (version / "model.json").write_text(json.dumps({"model": model, **VLLM_ARGUMENTS, **(arguments or {})}, indent=4))
    return version


def write_trtllm(repository: Path, name: str, model: str, arguments: dict[str, Any] | None = None) -> Path:
    """A model of NVIDIA's LLM API layout, its backend switched; returns its version folder."""
    version = _version(repository, name, TRTLLM_CONFIG.replace('"tensorrt_llm"', f'"{name}"'))
    (version / "model.yaml").write_text(yaml.safe_dump({"model": model, **TRTLLM_ARGUMENTS, **(arguments or {})}))
    return version


def _version(repository: Path, name: str, config: str) -> Path:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    return version


def context(version_folder: Path, extra: str = "") -> ModelContext:
    """What a loader is given; `extra` is added to config.pbtxt."""
    folder = version_folder.parent
    config = text_format.Parse((folder / "config.pbtxt").read_text() + extra, ModelConfig())
    return ModelContext(
        name=folder.name,
        version=int(version_folder.name),
        config=config,
        model_folder=folder,
        version_folder=version_folder,
        host=cast(Host, None),
    )
