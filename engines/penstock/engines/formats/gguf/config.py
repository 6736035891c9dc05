"""A GGUF file's settings as Hugging Face's config.json and generation_config.json have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.formats.gguf.architectures import ARCHITECTURES, Architecture
from penstock.engines.formats.gguf.container import StoredBlocks
from penstock.engines.formats.gguf.tensors import ROPE_FACTORS

_ENDS = ("eos", "eot", "eom")
"""Tokens that end an answer, by the metadata's names."""
_END_TEXTS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<end_of_turn>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|eom_id|>",
    )
)
"""Of tokens that llama.cpp takes for such ends, whether the metadata names them or not."""
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_NEUTRAL_ROPES = ("none", "", None)


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """Raises UnsupportedError for one that is not known."""
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedError(f"GGUF files of architecture {str(name)[:50]} are not supported; supported are {known}")
    return ARCHITECTURES[str(name)]


def config_of(metadata: Mapping[str, Any], tensors: Mapping[str, StoredBlocks]) -> dict[str, Any]:
    """config.json. Raises EngineError where a setting is missing, UnsupportedError for what cannot be said in it."""
    architecture = architecture_of(metadata)
    settings = _Settings(metadata)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise EngineError("the GGUF file has no matrix token_embd.weight")
    heads = settings.count("attention.head_count")
    head_dim = settings.count("attention.key_length", settings.count("embedding_length") // heads)
    config: dict[str, Any] = {
        "architectures": [architecture.hugging_face],
        "vocab_size": embedding.shape[0],
        "hidden_size": settings.count("embedding_length"),
        "intermediate_size": settings.count("feed_forward_length"),
        "num_hidden_layers": settings.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": settings.count("context_length"),
        "rope_theta": settings.number("rope.freq_base", 10000.0),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": end_token_ids(metadata),
    }
    rotated = settings.count("rope.dimension_count", head_dim)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    window = settings.count("attention.sliding_window", 0)
    if window:
        config["sliding_window"] = window
        config["use_sliding_window"] = True
    scaling = _rope_scaling(settings, tensors.get(ROPE_FACTORS))
    return {**config, **architecture.settings(config), **({"rope_scaling": scaling} if scaling else {})}


def generation_config_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json."""
    sampling = {
        name: metadata[key]
        for short, name in _SAMPLING.items()
        if isinstance(metadata.get(key := f"general.sampling.{short}"), int | float)
    }
    return {"eos_token_id": end_token_ids(metadata), **sampling}


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDS]
    by_text = [i for i, text in enumerate(_texts(metadata)) if text in _END_TEXTS]
    return sorted({i for i in (*named, *by_text) if type(i) is int})


def _texts(metadata: Mapping[str, Any]) -> Iterable[Any]:
    found = metadata.get("tokenizer.ggml.tokens")
    return found if isinstance(found, list) else ()


def _rope_scaling(settings: _Settings, factors: StoredBlocks | None) -> dict[str, Any]:
    kind = settings.get("rope.scaling.type")
    if factors is not None:
        if factors.dtype != "F32" or kind not in _NEUTRAL_ROPES:
            raise UnsupportedError(f"{ROPE_FACTORS} of type {factors.dtype} with rope.scaling.type={kind}")
        values = factors.rows.reshape(-1).view(np.float32)
        return {"rope_type": "divided", "divisors": [float(value) for value in values]}
    if kind in _NEUTRAL_ROPES:
        return {}
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(f"the GGUF file has rope.scaling.type={str(kind)[:50]}, which is not supported")
    scaling = {"rope_type": kind, "factor": settings.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = settings.count("rope.scaling.original_context_length")
    return scaling


class _Settings:
    """The metadata of the file's own architecture."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._prefix = f"{metadata['general.architecture']}."

    def get(self, name: str) -> Any:
        return self._metadata.get(self._prefix + name)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, list) and len(set(map(str, value))) == 1:
            value = value[0]  # one for each layer, all the same
        if isinstance(value, list):
            raise UnsupportedError(f"the GGUF file has a {self._prefix}{name} that differs between layers")
        if type(value) is not int or value <= 0:
            raise EngineError(f"the GGUF file has {self._prefix}{name}={str(value)[:50]}, which should be a count")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise EngineError(f"the GGUF file has {self._prefix}{name}={str(value)[:50]}, which should be a number")
        return float(value)
