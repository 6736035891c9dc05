"""The files of a model: its weights, and the JSON beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.engines.errors import EngineError, UnsupportedError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """Raises EngineError when there is no JSON object to be read."""
    try:
        settings = json.loads(path.read_bytes())
    except OSError as e:
        raise EngineError(f"{path} cannot be read: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise EngineError(f"{path} is not JSON: {e}") from e
    if not isinstance(settings, dict):
        raise EngineError(f"{path} does not hold an object")
    return settings


def eos_token_ids(model_dir: Path, model_settings: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Of generation_config.json, else of config.json, as in transformers; one id or several."""
    path = model_dir / "generation_config.json"
    eos = read_json(path).get("eos_token_id") if path.is_file() else None
    if eos is None:
        eos = model_settings.get("eos_token_id")
    return ids_of_vocabulary(eos, vocab_size)


def ids_of_vocabulary(found: Any, vocab_size: int) -> tuple[int, ...]:
    """Of one id, several, or None: those that a model can sample, since its logits end at `vocab_size`."""
    ids = found if isinstance(found, list) else [] if found is None else [found]
    return tuple(i for i in map(int, ids) if 0 <= i < vocab_size)


def has_weights(model_dir: Path) -> bool:
    """Whether `weight_files` would find safetensors."""
    return any((model_dir / name).is_file() for name in (_SINGLE, _INDEX))


def weight_files(model_dir: Path) -> list[Path]:
    """One file, or the shards that an index names; whether those are there is not looked at.

    Only safetensors of the folder itself: other formats of the field are pickles, which run code when they are loaded.
    Raises UnsupportedError where there are none, EngineError for an index that is damaged or names anything else.
    """
    single, index = model_dir / _SINGLE, model_dir / _INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in model_dir.glob(pattern)]
        found = f"; {pickles[0]} is a pickle, which is never loaded" if pickles else ""
        raise UnsupportedError(f"no model.safetensors in {model_dir}: weights are read from safetensors only{found}")
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        strange = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise EngineError(f"{index.name} is damaged: {e!r}") from e
    if strange:
        raise EngineError(f"{index.name} names a file that is no safetensors file of its folder: {strange[0]}")
    return [model_dir / name for name in names]
