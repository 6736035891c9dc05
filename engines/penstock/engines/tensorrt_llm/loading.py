"""Loading: from options to a batcher. Nothing of TensorRT-LLM is imported before its version is known.

Written against the public sources of NVIDIA/TensorRT-LLM on the way to 1.2 (1.2.0rc2 and revisions up to early 2026):
llmapi/llm.py, llmapi/llm_args.py, executor/{executor,proxy,base_worker,result,request}.py, sampling_params.py,
lora_helper.py and the PyTorch backend's py_executor.py and sampler.py; the released wheels were not at hand. `contract`
holds what is used of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from penstock.engines.contract.continuous_batcher import ContinuousBatcher
from penstock.engines.errors import EngineError
from penstock.engines.kit.package_contract import field_names, installed_release, resolve
from penstock.engines.tensorrt_llm.arguments import check_engine_args, llm_arguments
from penstock.engines.tensorrt_llm.config import (
    CheckpointFacts,
    TensorRTLLMConfig,
    check_settings,
    read_checkpoint,
    read_config,
)
from penstock.engines.tensorrt_llm.contract import CONTRACT, KV_CACHE_CONFIG, LLM_ARGS

logger = logging.getLogger(__name__)

OLDEST = (1, 2)
TOO_NEW = (1, 3)
"""1.3 has other samplers and other defaults: it is let in when it has been looked at."""

DISTRIBUTION = "tensorrt-llm"


def installed_version(version_of: Callable[[str], str] = metadata.version) -> str:
    """Such as "1.2.1". Raises EngineError when it is not installed, or not one that this engine knows."""
    version = installed_release((DISTRIBUTION,), OLDEST, TOO_NEW, version_of)
    if version is None:
        raise EngineError("TensorRT-LLM is not installed: pip install 'penstock-server[tensorrt-llm]'")
    return version


def load(options: Mapping[str, Any], clock: Callable[[], float] = time.monotonic) -> ContinuousBatcher:
    """`options`: fields of TensorRTLLMConfig as JSON.

    Raises InvalidRequestError and UnsupportedError for settings that cannot be, EngineError when TensorRT-LLM is
    missing, of another version, or cannot load the model.
    """
    version = installed_version()
    config = read_config(options)
    checkpoint = read_checkpoint(config)
    check_settings(config, checkpoint)
    CONTRACT.check("TensorRT-LLM", version)
    check_engine_args(config.engine_args, field_names(resolve(LLM_ARGS)), field_names(resolve(KV_CACHE_CONFIG)))
    from penstock.engines.tensorrt_llm.adapters import TensorRTLLMAdapters
    from penstock.engines.tensorrt_llm.batcher import TensorRTLLMBatcher

    adapters = TensorRTLLMAdapters(config)
    return TensorRTLLMBatcher(start(config, checkpoint), adapters, config, checkpoint, version, clock)


def start(config: TensorRTLLMConfig, checkpoint: CheckpointFacts) -> Any:
    """TensorRT-LLM's LLM: its worker processes, the weights and the KV cache."""
    from tensorrt_llm import LLM
    from tensorrt_llm.llmapi.llm_args import KvCacheConfig
    from tensorrt_llm.lora_helper import LoraConfig

    arguments = llm_arguments(config, checkpoint)
    arguments["kv_cache_config"] = KvCacheConfig(**arguments["kv_cache_config"])
    if "lora_config" in arguments:
        arguments["lora_config"] = LoraConfig(**arguments["lora_config"])
    logger.info("starting TensorRT-LLM with %s", arguments)
    try:
        return LLM(**arguments)
    except RuntimeError as error:
        raise EngineError(f"TensorRT-LLM cannot load the model: {error}") from error
