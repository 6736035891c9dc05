"""Random weights in the format of safetensors, without torch: tensors are made and written one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from benchmarks.peers.shapes import VOCABULARY, Shape

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
    hidden, kv = shape.hidden, shape.kv_heads * shape.head
    yield Weight("model.embed_tokens.weight", (shape.vocabulary, hidden))
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        yield Weight(f"{at}.input_layernorm.weight", (hidden,))
        for name, size in (("q", shape.heads * shape.head), ("k", kv), ("v", kv)):
            yield Weight(f"{at}.self_attn.{name}_proj.weight", (size, hidden))
            if shape.biases:
                yield Weight(f"{at}.self_attn.{name}_proj.bias", (size,))
        yield Weight(f"{at}.self_attn.o_proj.weight", (hidden, shape.heads * shape.head))
        yield Weight(f"{at}.post_attention_layernorm.weight", (hidden,))
        yield Weight(f"{at}.mlp.gate_proj.weight", (shape.intermediate, hidden))
        yield Weight(f"{at}.mlp.up_proj.weight", (shape.intermediate, hidden))
        yield Weight(f"{at}.mlp.down_proj.weight", (hidden, shape.intermediate))
    yield Weight("model.norm.weight", (hidden,))
    if not shape.tied:
        yield Weight("lm_head.weight", (shape.vocabulary, hidden))


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
                file.write(values.astype(ml_dtypes.bfloat16).tobytes())


def _in_layer(weight: Weight) -> bool:
    return weight.name.endswith("_proj.weight")


def _eight_bits(weight: Weight) -> list[Weight]:
    """What is stored in its place: integers and their scales."""
    if not _in_layer(weight):
        return [weight]
    return [Weight(weight.name, weight.shape, "I8"), Weight(f"{weight.name}_scale", (weight.shape[0], 1), "F32")]


def _values(weight: Weight, shape: Shape, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    if weight.name.endswith("norm.weight"):
        return np.ones(weight.shape, np.float32)
    if weight.name.endswith(".bias"):
        return np.zeros(weight.shape, np.float32)
    drawn = rng.standard_normal(weight.shape, np.float32) * np.float32(shape.spread)
    if weight.shape[0] == shape.vocabulary:
        # Logits of entries that the tokenizer lacks cost what they cost, and are never the largest. Zeros would not do:
        # such a token would give no logits at all, and engines that try themselves out would wonder.
        drawn[VOCABULARY:] *= _FAINT
    return drawn
