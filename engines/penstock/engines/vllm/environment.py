"""Environment variables that vLLM and its libraries read when they are imported, set in the engine process."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from penstock.engines.host.cores import usable_cores
from penstock.engines.vllm.config import VLLMConfig

_SMALL_BYTES = 256 << 20
"""Weights below this are computed faster by one thread: handing a layer out to threads costs more than it saves."""


def prepare(config: VLLMConfig, cpu: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """To be called before vLLM and torch are imported. What an operator has set stays, but for what must be."""
    environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # this process is the engine process
    environ["VLLM_COMPUTE_NANS_IN_LOGITS"] = "1"  # a request with broken logits ends alone
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_CONFIGURE_LOGGING": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "TOKENIZERS_PARALLELISM": "false",
        # the model is a local folder: nothing is to be fetched, and no hub to be asked
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if cpu:
        threads = str(config.threads or default_threads(config.model_dir))
        defaults |= {
            "VLLM_TARGET_DEVICE": "cpu",
            "OMP_NUM_THREADS": threads,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # of worker processes: they share the machine with others
        }
        if config.threads is not None:
            environ["OMP_NUM_THREADS"] = threads
    for name, value in defaults.items():
        environ.setdefault(name, value)


def default_threads(model_dir: Path) -> int:
    """Compute threads for a model on the CPU: one for a small model, else one for each core that we may use."""
    size = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    return 1 if size < _SMALL_BYTES else usable_cores()
