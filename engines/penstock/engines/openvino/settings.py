"""The JSON files beside the weights, and what the runner's own settings make of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.engines.errors import ContextLengthError, EngineError
from penstock.engines.openvino.config import OpenVINOConfig


def read_json(path: Path) -> dict[str, Any]:
    """Raises EngineError when there is no JSON object to be read."""
    try:
        settings = json.loads(path.read_bytes())
    except OSError as e:
        raise EngineError(f"{path} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise EngineError(f"{path} is not JSON: {e}") from e
    if not isinstance(settings, dict):
        raise EngineError(f"{path} does not hold an object")
    return settings


def max_model_len(config: OpenVINOConfig, limit: int) -> int:
    """`limit` is what the model was made for; raises ContextLengthError when more is asked for."""
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ContextLengthError(
            f"max_model_len={config.max_model_len} is above the model's {limit}", param="max_model_len"
        )
    return config.max_model_len


def eos_token_ids(model_dir: Path, model_settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Of generation_config.json, else of config.json, as in transformers; one id or several."""
    path = model_dir / "generation_config.json"
    eos = read_json(path).get("eos_token_id") if path.is_file() else None
    if eos is None:
        eos = model_settings.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(int(i) for i in eos) if isinstance(eos, list) else (int(eos),)
