"""The size of a model by its files: config.json, and the headers of its weights.

Both may be of models that only some engine knows. What is not understood is left open (None, or no tensors): the
engine, which has to read all of it, is the one to complain.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock.engines.errors import EngineError, PenstockError, UnsupportedError
from penstock.engines.formats.gguf.files import gguf_files, read_parts
from penstock.engines.formats.model_files import exported_graph, read_json, weight_files, weights_of
from penstock.engines.formats.model_settings import context_length, is_eagle3, text_settings
from penstock.engines.formats.quantized.schemes import parse_scheme
from penstock.engines.formats.safetensors_file import TensorHeader, read_header
from penstock.gateway.models.memory.state_shape import StateShape, num_layers, read_states

FLOAT_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
_PACKED_WORDS = (".qweight", ".weight_packed")
"""Ends of the names of matrices whose weights are packed into words."""
_OTHER_CACHES = ("kv_lora_rank", "layer_block_type", "ssm_cfg")
_HYBRIDS = ("hybrid_override_pattern", "attn_layer_indices", "conv_L_cache", "linear_num_value_heads", "mamba_n_heads")
"""Keys of models that keep something else than keys and values of each head in each layer; those of the second kind
keep states (`read_states`)."""


class KeptHeads(NamedTuple):
    """Of layers that keep keys and values of heads of one size."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def token_values(self) -> int:
        """Numbers that the KV cache keeps of a token."""
        return self.layers * 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Of a decoder whose layers keep keys and values, or states."""

    layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    kv_heads: int
    head_dim: int
    max_len: int
    kept: tuple[KeptHeads, ...]
    """Without layers that read the keys and values of others, or keep states."""
    is_head: bool = False
    """It is a draft head: of each token it is given one more vector of its hidden size, which is kept."""
    is_capped: bool = False
    """Its attention caps scores."""
    states: StateShape | None = None
    """Of recurrent layers; None: no layer keeps any."""


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
        settings: Any = text_settings(read_json(folder / "config.json"))
        config = settings.get("text_config") or settings
        states = read_states(config)
        is_hybrid = any(config.get(key) for key in _HYBRIDS) or "linear_attention" in (config.get("layer_types") or ())
        if any(config.get(key) for key in _OTHER_CACHES) or (is_hybrid and states is None):
            return None
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        inner = config.get("intermediate_size") or config["moe_intermediate_size"]
        shape = ModelShape(
            layers=num_layers(config),
            hidden_size=config["hidden_size"],
            intermediate_size=max(inner) if isinstance(inner, list) else inner,  # Gemma 3n's, by layer
            vocab_size=config["vocab_size"],
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_len=context_length(config) or config["max_position_embeddings"],
            kept=_kept(config, states, kv_heads, head_dim),
            is_head=is_eagle3(config),
            is_capped=bool(config.get("attn_logit_softcapping")),
            states=states,
        )
    except (PenstockError, OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        return None
    sizes = [getattr(shape, name) for name in shape.__slots__ if not name.startswith("is_") and name not in _PARTS]
    sizes += [len(shape.kept), *(size for part in shape.kept for size in part)]
    sizes += [] if states is None else [states.attending, states.convolved, states.summed + 1]
    return shape if all(isinstance(size, int) and 0 < size < 2**40 for size in sizes) else None


_PARTS = ("kept", "states")
"""Fields of `ModelShape` that are no numbers."""


def _kept(config: Mapping[str, Any], states: StateShape | None, kv_heads: int, head_dim: int) -> tuple[KeptHeads, ...]:
    """Gemma 3n's and 4's last layers read what earlier ones keep; in Gemma 4, layers without a window have heads of
    another size, of which there may be fewer."""
    if states is not None:
        return (KeptHeads(states.attending, kv_heads, head_dim),)
    layers = config["num_hidden_layers"] - (config.get("num_kv_shared_layers") or 0)
    own = config.get("per_layer_config") or {}
    usual = {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    if not own and config.get("global_head_dim"):
        fewer = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        wide = {"num_key_value_heads": fewer or kv_heads, "head_dim": config["global_head_dim"]}
        kinds = config["layer_types"][:layers]
        own = {str(n): wide for n, kind in enumerate(kinds) if kind == "full_attention"}
    if not own:
        return (KeptHeads(layers, kv_heads, head_dim),)
    sizes = [usual | own.get(str(n), {}) for n in range(layers)]
    counts = Counter((size["num_key_value_heads"], size["head_dim"]) for size in sizes)
    return tuple(KeptHeads(count, *size) for size, count in counts.items())


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
        StoredSize(tensor.dtype, math.prod(tensor.shape), tensor.rows.nbytes, len(tensor.shape) > 1)
        for tensor in tensors.values()
    ]


def _bits_of_words(folder: Path) -> int | None:
    """Of a weight in a quantized checkpoint; None: it is none that is known."""
    try:
        scheme = parse_scheme(read_json(folder / "config.json"))
    except (PenstockError, OSError, ValueError, AttributeError, RecursionError):
        return None
    return None if scheme is None else scheme.bits


def _sizes(path: Path, bits: int | None) -> list[StoredSize]:
    return [_size(name, header, bits) for name, header in read_header(path).items()]


def _size(name: str, header: TensorHeader, bits: int | None) -> StoredSize:
    if bits is not None and header.dtype == "I32" and name.endswith(_PACKED_WORDS):
        return StoredSize(f"int{bits}", header.num_bytes * 8 // bits, header.num_bytes, is_matrix=True)
    if bits is not None and header.dtype == "U8" and name.endswith(".weight"):  # of bitsandbytes
        return StoredSize(f"fp{bits}", header.num_bytes * 8 // bits, header.num_bytes, is_matrix=True)
    if bits is not None and header.dtype == "U8" and name.endswith("_blocks"):
        return StoredSize("MXFP4", header.num_bytes * 8 // bits, header.num_bytes, is_matrix=True)
    return StoredSize(
        header.dtype, math.prod(header.shape), header.num_bytes, header.dtype != "U8" and len(header.shape) > 1
    )
