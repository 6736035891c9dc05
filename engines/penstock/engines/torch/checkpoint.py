"""What may be loaded at all: a folder with config.json and safetensors, and nothing in it that runs code.

transformers is told not to trust remote code; what could ask it to run some is refused here, before it sees the folder
(CVE-2026-4372: `_attn_implementation_internal` in config.json fetched kernels from a hub).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.engines.errors import UnsupportedError
from penstock.engines.formats.model_files import read_json, weight_files

_REFUSED = {
    "auto_map": "a model's own code is never run; without this key transformers' own class of that model is used",
    "quantization_config": "quantized checkpoints are not supported",
    "text_config": "multimodal models are not supported",
}


def read_config(model_dir: Path) -> dict[str, Any]:
    """config.json, and the names of the weight files, looked over. Raises UnsupportedError, naming what is refused."""
    settings = read_json(model_dir / "config.json")
    for key, meaning in _REFUSED.items():
        if settings.get(key) is not None:
            raise UnsupportedError(f"config.json has {key}: {meaning}")
    for key, value in _entries(settings):
        if key == "auto_map":
            raise UnsupportedError(f"config.json has {key}: {_REFUSED['auto_map']}")
        # Of attention, and of experts: a name with a slash is a repository to fetch code from.
        if "_implementation" in key and "/" in str(value):
            raise UnsupportedError(f"config.json has {key}={value!r}: kernels are not fetched from elsewhere")
    if (model_dir / "adapter_config.json").exists():
        raise UnsupportedError(
            f"{model_dir} has adapter_config.json: adapters are loaded beside a model (--lora NAME=FOLDER), not as one"
        )
    weight_files(model_dir)  # transformers would unpickle a shard of another kind, and follow a path out of the folder
    return settings


def _entries(settings: Any) -> Iterator[tuple[str, Any]]:
    """Every key with its value, however deep."""
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            yield str(key), value
            yield from _entries(value)
    elif isinstance(settings, list):
        for value in settings:
            yield from _entries(value)
