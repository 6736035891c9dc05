"""Which engine runs a model when the operator leaves that to the server."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.engines.errors import EngineError, PenstockError
from penstock.engines.formats.gguf.files import gguf_files
from penstock.engines.formats.model_files import exported_graph, read_json
from penstock.engines.host.gpus import visible_gpus
from penstock.engines.openvino.families import parse_config
from penstock.gateway.configuration.config import ConfigError

logger = logging.getLogger("penstock")


def choose_engine(folder: Path) -> str:
    """With a GPU vllm or torch, as installed; on a CPU openvino, and torch for the architectures that it does not have.
    GGUF files and OpenVINO's own are openvino's everywhere, quantized checkpoints wherever vllm is not.

    Raises ConfigError when the folder has no readable config.json, and when torch would be needed and is not there, or
    would refuse the model, too.
    """
    if gguf_files(folder):
        refusal = _openvino_refusal(_read_settings(folder))
        if refusal is not None:
            raise ConfigError(f"model: {refusal}; no other engine reads GGUF files")
        return "openvino"
    if exported_graph(folder) is not None:
        return "openvino"
    if visible_gpus() and find_spec("vllm") is not None:
        return "vllm"
    settings = _read_settings(folder)
    is_quantized = bool(settings.get("quantization_config"))
    has_torch = find_spec("torch") is not None and find_spec("transformers") is not None
    if visible_gpus() and has_torch and not is_quantized:
        return "torch"
    refusal = _openvino_refusal(settings)
    if refusal is None:
        return "openvino"
    if is_quantized:
        raise ConfigError(f"model: {refusal}; torch runs no quantized checkpoints, vllm may (--engine vllm)")
    if not has_torch:
        raise ConfigError(f"model: {refusal}; the torch engine may run it: pip install 'penstock-server[torch]'")
    logger.info("engine torch: openvino does not run this model: %s", refusal)
    return "torch"


def _read_settings(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / "config.json")
    except EngineError as error:
        raise ConfigError(f"model: {error.message}") from None


def _openvino_refusal(settings: dict[str, Any]) -> str | None:
    try:
        parse_config(settings)
    except PenstockError as error:
        return error.message
    return None
