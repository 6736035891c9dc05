"""The JSON files beside a model's weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.engines.errors import EngineError


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


def eos_token_ids(model_dir: Path, model_settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Of generation_config.json, else of config.json, as in transformers; one id or several."""
    path = model_dir / "generation_config.json"
    eos = read_json(path).get("eos_token_id") if path.is_file() else None
    if eos is None:
        eos = model_settings.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(int(i) for i in eos) if isinstance(eos, list) else (int(eos),)
