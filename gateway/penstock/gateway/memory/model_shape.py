"""What a model's files say of its size, before anything of it is loaded: config.json, and the headers of its weights.

Both may be of models that only some engine knows. What is not understood is left open (None, or no tensors): the
engine, which has to read all of it, is the one to complain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engines.errors import EngineError, PenstockError, UnsupportedError
from penstock.engines.formats.gguf.files import gguf_files, read_parts
from penstock.engines.formats.model_files import exported_graph, read_json, weight_files, weights_of
from penstock.engines.formats.model_settings import context_length, is_eagle3, text_settings
from penstock.engines.formats.quantized.schemes import parse_scheme
from penstock.engines.formats.safetensors_file import TensorHeader, read_header

FLOAT_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
_WORDS = (".qweight", ".weight_packed")
"""Ends of the names of matrices whose weights are packed into words."""
_OTHER_CACHES = ("kv_lora_rank", "layer_block_type", "hybrid_override_pattern", "attn_layer_indices", "ssm_cfg")
"""Keys of models that keep something else than keys and values of each head in each layer."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Of a decoder whose layers all keep keys and values."""

    layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    kv_heads: int
    head_dim: int
    max_len: int
    is_head: bool = False
    """It is a draft head: of each token it is given one more vector of its hidden size, which is kept."""
    is_capped: bool = False
    """Its attention caps scores."""

    @property
    def token_values(self) -> int:
        """Numbers that the KV cache keeps of a token."""
        return self.layers * 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class StoredSize:
    """Of one tensor in a checkpoint."""

    dtype: str
    """As the format names it, "BF16" or "Q4_K" for one; "int4" for weights of 4 bits in words, "MXFP4" for blocks."""
    count: int
    """Elements; of weights in words as many as these stand for."""
    num_bytes: int
    is_matrix: bool


def read_shape(folder: Path) -> ModelShape | None:
    """From config.json; None where it is not that of a decoder of this kind."""
    try:
        found: Any = text_settings(read_json(folder / "config.json"))
        config = found.get("text_config") or found
        if any(config.get(key) for key in _OTHER_CACHES) or "linear_attention" in (config.get("layer_types") or ()):
            return None
        heads = config["num_attention_heads"]
        shape = ModelShape(
            layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            max_len=context_length(config) or config["max_position_embeddings"],
            is_head=is_eagle3(config),
            is_capped=bool(config.get("attn_logit_softcapping")),
        )
    except (PenstockError, OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        return None
    sizes = (getattr(shape, name) for name in shape.__slots__ if not name.startswith("is_"))
    return shape if all(isinstance(size, int) and 0 < size < 2**40 for size in sizes) else None


def stored_sizes(folder: Path) -> list[StoredSize]:
    """Every tensor of the weights; none for files that cannot be read. Of OpenVINO's graphs all of them as one, a byte
    for an element: they are held as they are."""
    try:
        gguf = gguf_files(folder)
        if gguf:
            return _block_sizes(gguf)
        graph = exported_graph(folder)
        if graph is not None:
            num_bytes = weights_of(graph).stat().st_size
            return [StoredSize("int8", num_bytes, num_bytes, is_matrix=True)]
        bits = _bits_of_words(folder)
        return [size for path in _weight_files(folder) for size in _sizes(path, bits)]
    except (EngineError, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []


def _weight_files(folder: Path) -> list[Path]:
    """Also of folders that only some engine reads."""
    try:
        return weight_files(folder)
    except UnsupportedError:
        return sorted(folder.glob("*.safetensors"))


def _block_sizes(paths: list[Path]) -> list[StoredSize]:
    _, tensors, _ = read_parts(paths)
    return [
        StoredSize(found.dtype, math.prod(found.shape), found.rows.nbytes, len(found.shape) > 1)
        for found in tensors.values()
    ]


def _bits_of_words(folder: Path) -> int | None:
    """Of a weight in a quantized checkpoint; None: it is none that is known."""
    try:
        scheme = parse_scheme(read_json(folder / "config.json"))
    except (PenstockError, OSError, ValueError, AttributeError, RecursionError):
        return None
    return None if scheme is None else scheme.bits


def _sizes(path: Path, bits: int | None) -> list[StoredSize]:
    return [_size(name, found, bits) for name, found in read_header(path).items()]


def _size(name: str, found: TensorHeader, bits: int | None) -> StoredSize:
    if bits is not None and found.dtype == "I32" and name.endswith(_WORDS):
        return StoredSize(f"int{bits}", found.num_bytes * 8 // bits, found.num_bytes, is_matrix=True)
    if bits is not None and found.dtype == "U8" and name.endswith(".weight"):  # of bitsandbytes
        return StoredSize(f"fp{bits}", found.num_bytes * 8 // bits, found.num_bytes, is_matrix=True)
    if bits is not None and found.dtype == "U8" and name.endswith("_blocks"):
        return StoredSize("MXFP4", found.num_bytes * 8 // bits, found.num_bytes, is_matrix=True)
    return StoredSize(
        found.dtype, math.prod(found.shape), found.num_bytes, found.dtype != "U8" and len(found.shape) > 1
    )
