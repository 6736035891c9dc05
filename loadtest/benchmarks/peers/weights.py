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
_ITEM = 2
"""Bytes of a bfloat16."""


class Weight(NamedTuple):
    name: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return _ITEM * prod(self.shape)


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


def write_weights(shape: Shape, path: Path, seed: int = 0) -> None:
    """The same bytes for the same seed (https://huggingface.co/docs/safetensors: length, JSON, tensors end to end)."""
    offset = 0
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for weight in weights(shape):
        end = offset + weight.bytes
        entries[weight.name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for weight in weights(shape):
            file.write(_values(weight, shape, rng).astype(ml_dtypes.bfloat16).tobytes())


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
