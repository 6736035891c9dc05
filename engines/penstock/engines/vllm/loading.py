"""Loading of a model by options. Nothing of vLLM is imported before its version is known and the environment is set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.engines.contract.continuous_batcher import ContinuousBatcher
from penstock.engines.contract.runner import ModelRunner
from penstock.engines.errors import InvalidRequestError
from penstock.engines.host.memory import parse_memory
from penstock.engines.vllm.config import VLLMConfig, prepare
from penstock.engines.vllm.contract import installed_version, is_cpu_build


def load(options: dict[str, Any]) -> ModelRunner:
    """For our scheduler. `options`: fields of VLLMConfig; paths as text, `kv_cache_memory` also as "4GiB" or "40%".

    Raises EngineError when vLLM is missing or of another version, UnsupportedError for a model that our scheduler
    cannot drive.
    """
    config = parse(options)
    version = _prepare(config)
    if is_cpu_build() and config.num_devices == 1:
        from penstock.engines.vllm.runner import VLLMHostRunner

        return VLLMHostRunner(config, version)
    from penstock.engines.vllm.runner import VLLMRunner

    return VLLMRunner(config, version)


def load_batcher(options: dict[str, Any]) -> ContinuousBatcher:
    """For vLLM's own scheduler; otherwise as `load`."""
    config = parse(options)
    version = _prepare(config)
    from penstock.engines.vllm.batcher import VLLMBatcher

    return VLLMBatcher(config, version)


def parse(options: dict[str, Any]) -> VLLMConfig:
    """Raises InvalidRequestError."""
    memory = options.get("kv_cache_memory")
    resolved = options | {
        "model_dir": Path(options["model_dir"]),
        "kv_cache_memory": None if memory is None else parse_memory(memory),
        "adapters": {key: Path(path) for key, path in options.get("adapters", {}).items()},
    }
    try:
        return VLLMConfig(**resolved)
    except TypeError as e:
        raise InvalidRequestError(f"the vLLM engine: {e}") from e


def _prepare(config: VLLMConfig) -> str:
    """Returns the installed version."""
    version = installed_version()
    prepare(config, is_cpu_build())
    from penstock.engines.vllm.contract import CONTRACT

    CONTRACT.check("vLLM", version)
    return version
