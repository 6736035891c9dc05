"""GGUF files of a model's folder: one, or the parts that a large model was split into; and their settings as Hugging
Face's config.json and generation_config.json have them.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.formats.gguf.architecture import Architecture
from penstock.engines.formats.gguf.architectures import ARCHITECTURES, find_architecture
from penstock.engines.formats.gguf.container import FileSettings, GGUFFile, StoredBlocks, read_gguf
from penstock.engines.formats.gguf.tensors import (
    ROPE_FACTORS,
    ROPE_FACTORS_BY_LENGTH,
    FileTensor,
    named_tensors,
    stated_tensors,
)

_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_NEUTRAL_ROPES = ("none", "", None)
_YARN = {
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "attention_factor": "rope.scaling.yarn_attn_factor",
}
"""Of config.json, by the metadata's names."""


def architecture_of(metadata: Mapping[str, Any], tensors: Mapping[str, StoredBlocks]) -> Architecture:
    """Raises UnsupportedError for one that is not known."""
    name = metadata.get("general.architecture")
    architecture = find_architecture(name, tensors)
    if architecture is None:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedError(f"GGUF files of architecture {str(name)[:50]} are not supported; supported are {known}")
    return architecture


def config_of(metadata: Mapping[str, Any], tensors: Mapping[str, StoredBlocks]) -> dict[str, Any]:
    """config.json. Raises EngineError where a setting is missing, UnsupportedError for what cannot be said in it."""
    architecture = architecture_of(metadata, tensors)
    settings = FileSettings(metadata, tensors, architecture.differing)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise EngineError("the GGUF file has no matrix token_embd.weight")
    heads = settings.count("attention.head_count")
    head_dim = settings.count("attention.key_length", settings.count("embedding_length") // heads)
    if not head_dim:
        raise EngineError(f"the GGUF file has {heads} heads for embeddings of {settings.count('embedding_length')}")
    config: dict[str, Any] = {
        "architectures": [architecture.hugging_face],
        "vocab_size": embedding.shape[0],
        "hidden_size": settings.count("embedding_length"),
        "intermediate_size": settings.count(
            "feed_forward_length", settings.get("expert_feed_forward_length"), some_zero=True
        ),
        "num_hidden_layers": settings.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.count("attention.head_count_kv", heads, some_zero=True),
        "head_dim": head_dim,
        architecture.eps_key: settings.number(architecture.eps),
        "max_position_embeddings": settings.count("context_length"),
        "rope_theta": settings.number("rope.freq_base", 10000.0),
        "attention_bias": settings.has("attn_q.bias", "attn_qkv.bias"),
        "mlp_bias": settings.has("ffn_up.bias"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "tensor_layout": "gguf",
    }
    # Also where it is 1: families mean something else where it is missing.
    config["partial_rotary_factor"] = settings.count("rope.dimension_count", head_dim) / head_dim
    if settings.get("attention.sliding_window") not in (None, 0):
        window = settings.count("attention.sliding_window")
        config["sliding_window"] = window
        config["use_sliding_window"] = True
    scaling = _rope_scaling(settings)
    config |= {"rope_scaling": scaling} if scaling else {}
    return {**config, **architecture.settings(settings, config)}


def sampling_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What generation_config.json says of sampling."""
    return {
        name: metadata[key]
        for short, name in _SAMPLING.items()
        if isinstance(metadata.get(key := f"general.sampling.{short}"), int | float)
    }


def _rope_scaling(settings: FileSettings) -> dict[str, Any]:
    kind, divisors = settings.get("rope.scaling.type"), settings.tensors.get(ROPE_FACTORS)
    if divisors is not None:
        _check_factors(ROPE_FACTORS, divisors, kind, _NEUTRAL_ROPES)
        return {"rope_type": "divided", "divisors": _values(divisors)}
    if any(name in settings.tensors for name in ROPE_FACTORS_BY_LENGTH):
        return _longrope(settings, kind)
    if kind is None:  # llama.cpp takes it for linear; the second key is that of files of 2023
        factor = settings.number("rope.scaling.factor", settings.number("rope.scale_linear", 1.0)) or 1.0
        return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    if kind in _NEUTRAL_ROPES:
        return {}
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(f"the GGUF file has rope.scaling.type={str(kind)[:50]}, which is not supported")
    scaling = {"rope_type": kind, "factor": settings.number("rope.scaling.factor")}
    if kind == "yarn":
        if settings.get("rope.scaling.original_context_length") is not None:
            scaling["original_max_position_embeddings"] = settings.count("rope.scaling.original_context_length")
        scaling |= {name: settings.number(key) for name, key in _YARN.items() if settings.get(key) is not None}
    return scaling


def _longrope(settings: FileSettings, kind: Any) -> dict[str, Any]:
    missing = [name for name in ROPE_FACTORS_BY_LENGTH if name not in settings.tensors]
    if missing:
        raise EngineError(f"the GGUF file has no tensor {missing[0]}")
    for name in ROPE_FACTORS_BY_LENGTH:
        _check_factors(name, settings.tensors[name], kind, (*_NEUTRAL_ROPES, "longrope"))
    short, long = (_values(settings.tensors[name]) for name in ROPE_FACTORS_BY_LENGTH)
    scaling: dict[str, Any] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    trained = settings.count("rope.scaling.original_context_length", settings.count("context_length"))
    scaling["original_max_position_embeddings"] = trained
    if settings.get("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = settings.number("rope.scaling.attn_factor")
    return scaling


def _check_factors(name: str, stored: StoredBlocks, kind: Any, kinds: Sequence[Any]) -> None:
    if stored.dtype != "F32" or kind not in kinds:
        raise UnsupportedError(f"{name} of type {stored.dtype} with rope.scaling.type={kind}")


def _values(stored: StoredBlocks) -> list[float]:
    return [float(value) for value in stored.rows.reshape(-1).view(np.float32)]


SUFFIX = ".gguf"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def gguf_files(folder: Path) -> list[Path]:
    """Those in the folder; none where it has weights in safetensors."""
    return [] if any(folder.glob("*.safetensors")) else sorted(folder.glob("*" + SUFFIX))


def all_parts(path: Path) -> list[Path]:
    """A file, or all of those that it is a part of, beside it. Raises EngineError where one is missing."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    parts = [path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)]
    if path not in parts:
        raise EngineError(f"{path.name} is not one of {len(parts)} parts")
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise EngineError(f"{path.name} is one of {len(parts)} parts; there is no {missing[0]}")
    return parts


def read_parts(paths: Sequence[Path]) -> tuple[dict[str, Any], dict[str, StoredBlocks], list[mmap.mmap]]:
    """Metadata, which the first part has, the tensors of all, and what they look into. Raises EngineError."""
    parts: list[GGUFFile] = [read_gguf(path) for path in paths]
    tensors: dict[str, StoredBlocks] = {}
    for path, part in zip(paths, parts, strict=True):
        twice = next((name for name in part.tensors if name in tensors), None)
        if twice is not None:
            raise EngineError(f"{path.name} has a tensor {twice}, and so has a file beside it: they are not one model")
        tensors |= part.tensors
    return parts[0].metadata, tensors, [part.mapping for part in parts]


def read_tensors(paths: Sequence[Path]) -> tuple[dict[str, FileTensor], list[mmap.mmap]]:
    """By their names in Hugging Face's layout. Raises EngineError."""
    metadata, tensors, mappings = read_parts(paths)
    architecture, config = architecture_of(metadata, tensors), config_of(metadata, tensors)
    return {**named_tensors(tensors, architecture, config), **stated_tensors(metadata, architecture, config)}, mappings
