"""From options to a runner. Nothing of vLLM is imported before its version is known and the environment is set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.engines.base import ModelRunner
from penstock.engines.errors import InvalidRequestError
from penstock.engines.memory import parse_memory
from penstock.engines.vllm.config import VLLMConfig
from penstock.engines.vllm.environment import prepare
from penstock.engines.vllm.versions import installed_version, is_cpu_build


def load(options: dict[str, Any]) -> ModelRunner:
    """`options`: fields of VLLMConfig; paths as text, `kv_cache_memory` also as "4GiB" or "40%"."""
    memory = options.get("kv_cache_memory")
    resolved = options | {
        "model_dir": Path(options["model_dir"]),
        "kv_cache_memory": None if memory is None else parse_memory(memory),
        "adapters": {name: Path(path) for name, path in options.get("adapters", {}).items()},
    }
    try:
        config = VLLMConfig(**resolved)
    except TypeError as e:
        raise InvalidRequestError(f"the vLLM runner: {e}") from e
    return load_config(config)


def load_config(config: VLLMConfig) -> ModelRunner:
    """Raises EngineError when vLLM is missing or of another version, UnsupportedError for a model it cannot run."""
    version = installed_version()
    prepare(config, is_cpu_build())
    from penstock.engines.vllm.contract import check_contract
    from penstock.engines.vllm.runner import VLLMRunner

    check_contract(version)
    return VLLMRunner(config, version)
