"""Random weights in the format of safetensors, without torch: tensors are made and written one after the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from benchmarks.peers.shapes import LFM2_KERNEL, VOCABULARY, DeltaNet, QwenVision, Shape, Vision

_FAINT = np.float32(0.01)
_ITEMS = {"BF16": 2, "I8": 1, "F32": 4}
"""Bytes of the types, by safetensors' names."""
_EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8_CONFIG = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": _EIGHT_BITS | {"strategy": "channel", "dynamic": False},
                "input_activations": _EIGHT_BITS | {"strategy": "token", "dynamic": True},
            }
        },
    }
}
"""What config.json says of weights in 8 bits with a scale for each row, and activations with one for each token."""


class Weight(NamedTuple):
    name: str
    shape: tuple[int, ...]
    type: str = "BF16"

    @property
    def bytes(self) -> int:
        return _ITEMS[self.type] * prod(self.shape)


def weights(shape: Shape) -> Iterator[Weight]:
    """Under the names that transformers gives them."""
    at = "model.text_model" if shape.vision is not None and not isinstance(shape.vision, QwenVision) else "model"
    yield Weight(f"{at}.embed_tokens.weight", (shape.vocabulary, shape.hidden))
    for layer in range(shape.layers):
        yield from _LAYERS.get(shape.model_type, _layer)(shape, layer, f"{at}.layers.{layer}")
    last = "embedding_norm" if shape.model_type.startswith("lfm2") else "norm"
    yield Weight(f"{at}.{last}.weight", (shape.hidden,))
    if isinstance(shape.vision, QwenVision):
        yield from _qwen_vision(shape.vision, shape.hidden)
    elif shape.vision is not None:
        yield from _vision(shape.vision, shape.hidden)
    if not shape.tied:
        yield Weight("lm_head.weight", (shape.vocabulary, shape.hidden))


def _layer(shape: Shape, layer: int, at: str) -> Iterator[Weight]:
    """Of Llama and its kin."""
    yield Weight(f"{at}.input_layernorm.weight", (shape.hidden,))
    yield from _attention(shape, f"{at}.self_attn", "o_proj")
    if shape.model_type == "qwen3":
        yield from _head_norms(shape, f"{at}.self_attn", "norm")
    yield Weight(f"{at}.post_attention_layernorm.weight", (shape.hidden,))
    yield from _mlp(f"{at}.mlp", ("gate_proj", "up_proj", "down_proj"), shape.hidden, shape.intermediate)


def _attention(shape: Shape, at: str, output: str, *, gated: bool = False) -> Iterator[Weight]:
    size, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    for name, rows in (("q", 2 * size if gated else size), ("k", kv), ("v", kv)):
        yield Weight(f"{at}.{name}_proj.weight", (rows, shape.hidden))
        if shape.biases:
            yield Weight(f"{at}.{name}_proj.bias", (rows,))
    yield Weight(f"{at}.{output}.weight", (shape.hidden, size))


def _head_norms(shape: Shape, at: str, name: str) -> Iterator[Weight]:
    for of in "qk":
        yield Weight(f"{at}.{of}_{name}.weight", (shape.head,))


def _mlp(at: str, names: tuple[str, str, str], hidden: int, size: int) -> Iterator[Weight]:
    """`names`: gate, up and down."""
    gate, up, down = names
    yield Weight(f"{at}.{gate}.weight", (size, hidden))
    yield Weight(f"{at}.{up}.weight", (size, hidden))
    yield Weight(f"{at}.{down}.weight", (hidden, size))


def _lfm2_layer(shape: Shape, layer: int, at: str) -> Iterator[Weight]:
    yield Weight(f"{at}.operator_norm.weight", (shape.hidden,))
    if shape.has_attention(layer):
        yield from _attention(shape, f"{at}.self_attn", "out_proj")
        yield from _head_norms(shape, f"{at}.self_attn", "layernorm")
    else:
        yield Weight(f"{at}.conv.in_proj.weight", (3 * shape.hidden, shape.hidden))
        yield Weight(f"{at}.conv.conv.weight", (shape.hidden, 1, LFM2_KERNEL))
        yield Weight(f"{at}.conv.out_proj.weight", (shape.hidden, shape.hidden))
    yield Weight(f"{at}.ffn_norm.weight", (shape.hidden,))
    names = ("w1", "w3", "w2")
    if shape.experts is None or not shape.has_experts(layer):
        yield from _mlp(f"{at}.feed_forward", names, shape.hidden, shape.intermediate)
        return
    yield Weight(f"{at}.feed_forward.gate.weight", (shape.experts.number, shape.hidden))
    yield Weight(f"{at}.feed_forward.expert_bias", (shape.experts.number,), "F32")
    for expert in range(shape.experts.number):
        yield from _mlp(f"{at}.feed_forward.experts.{expert}", names, shape.hidden, shape.experts.size)


def _qwen3_5_layer(shape: Shape, layer: int, at: str) -> Iterator[Weight]:
    yield Weight(f"{at}.input_layernorm.weight", (shape.hidden,))
    if shape.delta is None or shape.has_attention(layer):
        yield from _attention(shape, f"{at}.self_attn", "o_proj", gated=True)
        yield from _head_norms(shape, f"{at}.self_attn", "norm")
    else:
        yield from _delta_net(shape.delta, shape.hidden, f"{at}.linear_attn")
    yield Weight(f"{at}.post_attention_layernorm.weight", (shape.hidden,))
    yield from _mlp(f"{at}.mlp", ("gate_proj", "up_proj", "down_proj"), shape.hidden, shape.intermediate)


def _delta_net(delta: DeltaNet, hidden: int, at: str) -> Iterator[Weight]:
    for name, rows in (("qkv", 3 * delta.size), ("z", delta.size), ("b", delta.heads), ("a", delta.heads)):
        yield Weight(f"{at}.in_proj_{name}.weight", (rows, hidden))
    yield Weight(f"{at}.conv1d.weight", (3 * delta.size, 1, delta.kernel))
    yield Weight(f"{at}.dt_bias", (delta.heads,))
    yield Weight(f"{at}.A_log", (delta.heads,))
    yield Weight(f"{at}.norm.weight", (delta.head,))
    yield Weight(f"{at}.out_proj.weight", (hidden, delta.size))


def _vision(vision: Vision, hidden: int) -> Iterator[Weight]:
    """`hidden`: of the model that reads what it gives."""
    at, size = "model.vision_model", vision.hidden
    yield Weight(f"{at}.embeddings.patch_embedding.weight", (size, 3, vision.patch, vision.patch))
    yield Weight(f"{at}.embeddings.patch_embedding.bias", (size,))
    yield Weight(f"{at}.embeddings.position_embedding.weight", ((vision.side // vision.patch) ** 2, size))
    for number in range(vision.layers):
        layer = f"{at}.encoder.layers.{number}"
        for name in "qkv":
            yield from _with_bias(f"{layer}.self_attn.{name}_proj", size, size)
        yield from _with_bias(f"{layer}.self_attn.out_proj", size, size)
        yield from _with_bias(f"{layer}.mlp.fc1", vision.intermediate, size)
        yield from _with_bias(f"{layer}.mlp.fc2", size, vision.intermediate)
        yield from _with_bias(f"{layer}.layer_norm1", size)
        yield from _with_bias(f"{layer}.layer_norm2", size)
    yield from _with_bias(f"{at}.post_layernorm", size)
    yield Weight("model.connector.modality_projection.proj.weight", (hidden, size * vision.joined**2))


def _qwen_vision(vision: QwenVision, hidden: int) -> Iterator[Weight]:
    size, wide = vision.hidden, vision.hidden * vision.joined**2
    yield Weight("visual.patch_embed.proj.weight", (size, 3, 2, vision.patch, vision.patch))
    for number in range(vision.layers):
        layer = f"visual.blocks.{number}"
        yield Weight(f"{layer}.norm1.weight", (size,))
        yield from _with_bias(f"{layer}.attn.qkv", 3 * size, size)
        yield from _with_bias(f"{layer}.attn.proj", size, size)
        yield Weight(f"{layer}.norm2.weight", (size,))
        for name in ("gate_proj", "up_proj"):
            yield from _with_bias(f"{layer}.mlp.{name}", vision.intermediate, size)
        yield from _with_bias(f"{layer}.mlp.down_proj", size, vision.intermediate)
    yield Weight("visual.merger.ln_q.weight", (size,))
    yield from _with_bias("visual.merger.mlp.0", wide, wide)
    yield from _with_bias("visual.merger.mlp.2", hidden, wide)


def _with_bias(at: str, rows: int, *columns: int) -> Iterator[Weight]:
    yield Weight(f"{at}.weight", (rows, *columns))
    yield Weight(f"{at}.bias", (rows,))


_LAYERS: dict[str, Callable[[Shape, int, str], Iterator[Weight]]] = {
    "lfm2": _lfm2_layer,
    "lfm2_moe": _lfm2_layer,
    "qwen3_5_text": _qwen3_5_layer,
}


def write_weights(shape: Shape, path: Path, seed: int = 0, *, w8a8: bool = False) -> None:
    """The same bytes for the same seed (https://huggingface.co/docs/safetensors: length, JSON, tensors end to end).
    `w8a8`: the matrices of the layers as `W8A8_CONFIG` says."""
    offset = 0
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    stored = [form for weight in weights(shape) for form in (_eight_bits(weight) if w8a8 else [weight])]
    for weight in stored:
        end = offset + weight.bytes
        entries[weight.name] = {"dtype": weight.type, "shape": list(weight.shape), "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for weight in weights(shape):
            values = _values(weight, shape, rng)
            if w8a8 and _in_layer(weight):
                scales = np.abs(values).max(axis=1, keepdims=True) / 127
                file.write(np.rint(values / scales).astype(np.int8).tobytes() + scales.tobytes())
            else:
                file.write(values.astype(np.float32 if weight.type == "F32" else ml_dtypes.bfloat16).tobytes())


def _in_layer(weight: Weight) -> bool:
    return weight.name.endswith("_proj.weight")


def _eight_bits(weight: Weight) -> list[Weight]:
    """What is stored in its place: integers and their scales."""
    if not _in_layer(weight):
        return [weight]
    return [Weight(weight.name, weight.shape, "I8"), Weight(f"{weight.name}_scale", (weight.shape[0], 1), "F32")]


def _values(weight: Weight, shape: Shape, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    module = weight.name.rpartition(".")[0].rpartition(".")[2]
    if ("norm" in module or module == "ln_q") and weight.name.endswith(".weight"):
        return np.ones(weight.shape, np.float32)
    if weight.name.endswith(".bias"):
        return np.zeros(weight.shape, np.float32)
    drawn = rng.standard_normal(weight.shape, np.float32) * np.float32(shape.spread)
    if weight.shape[0] == shape.vocabulary:
        # Logits of entries that the tokenizer lacks cost what they cost, and are never the largest. Zeros would not do:
        # such a token would give no logits at all, and engines that try themselves out would wonder.
        drawn[VOCABULARY:] *= _FAINT
    return drawn
