"""Tensors of a GGUF file as a checkpoint in Hugging Face's layout has them: named, in order, and as numbers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.engines.formats.gguf.architectures import Architecture
from penstock.engines.formats.gguf.container import StoredBlocks
from penstock.engines.formats.safetensors_file import Shape, StoredTensor

_FLOATS = ("F32", "F16", "BF16")

_WHOLE_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
ROPE_FACTORS = "rope_freqs.weight"
"""What the frequencies of rotary embedding are divided by: settings, that llama.cpp writes as a tensor."""


@dataclass(frozen=True)
class BlockTensor:
    """As `StoredTensor`, of quantized blocks."""

    dtype: str
    """ggml's name: Q4_K ..."""
    shape: Shape
    data: npt.NDArray[np.uint8]
    """[rows, bytes of a row]"""
    order: npt.NDArray[np.intp] | None = None
    """Where in `data` each row is; None: in order."""

    def rows_f32(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows [start, stop) of the first axis as float32."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        rows = self.data[start:stop] if self.order is None else self.data[self.order[start:stop]]
        with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):  # inf and nan are what the file says
            values = dequantize(rows, GGMLQuantizationType[self.dtype])
        return values.reshape(stop - start, *self.shape[1:])

    def f32(self) -> npt.NDArray[np.float32]:
        return self.rows_f32(0, self.shape[0])


def named_tensors(
    tensors: Mapping[str, StoredBlocks], architecture: Architecture, config: Mapping[str, Any]
) -> dict[str, StoredTensor | BlockTensor]:
    """By the names that a checkpoint of this architecture has; `config` is its config.json."""
    found: dict[str, StoredTensor | BlockTensor] = {}
    for name, blocks in tensors.items():
        if name == ROPE_FACTORS:
            continue
        part, _, kind = _renamed(name, architecture).rpartition(".")
        found[f"{part}.{kind}"] = _tensor(blocks, part, architecture, config)
    return found


def _renamed(name: str, architecture: Architecture) -> str:
    """A name that is not known stays as it is, and is refused as a tensor that no part of the model uses."""
    match = _BLOCK.fullmatch(name)
    part, _, kind = (match[2] if match else name).rpartition(".")
    names = architecture.block_parts if match else _WHOLE_MODEL
    if part not in names:
        return name
    return f"model.layers.{match[1]}.{names[part]}.{kind}" if match else f"{names[part]}.{kind}"


def _tensor(
    blocks: StoredBlocks, part: str, architecture: Architecture, config: Mapping[str, Any]
) -> StoredTensor | BlockTensor:
    order = None
    if architecture.pairs_interleaved and part.endswith((".q_proj", ".k_proj")):
        heads = config["num_attention_heads" if part.endswith(".q_proj") else "num_key_value_heads"]
        order = _halves_from_pairs(len(blocks.rows) if len(blocks.shape) > 1 else blocks.shape[0], heads)
    if blocks.dtype not in _FLOATS:
        return BlockTensor(blocks.dtype, blocks.shape, blocks.rows, order)
    data = blocks.rows
    if order is not None:
        data = data.reshape(blocks.shape[0], -1)[order]
    if architecture.norms_plus_one and part.endswith("norm"):
        values = StoredTensor(blocks.dtype, blocks.shape, data.reshape(-1)).f32() - np.float32(1)
        return StoredTensor("F32", blocks.shape, values.view(np.uint8))
    return StoredTensor(blocks.dtype, blocks.shape, data.reshape(-1))


def _halves_from_pairs(rows: int, heads: int) -> npt.NDArray[np.intp]:
    """llama.cpp turns neighbouring rows of a head together, Hugging Face's models row i of the first half and row i
    of the second."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
