"""Tensors of a GGUF file as a checkpoint in Hugging Face's layout has them: named, in order, and as numbers."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.engines.errors import EngineError
from penstock.engines.formats.gguf.architecture import Architecture
from penstock.engines.formats.gguf.container import StoredBlocks
from penstock.engines.formats.quantized.integers import Bytes
from penstock.engines.formats.quantized.mxfp4 import Mxfp4Tensor
from penstock.engines.formats.safetensors_file import Shape, StoredTensor

_FLOATS = ("F32", "F16", "BF16")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_KEYS, _VALUES, _BOTH = ".k_b_proj.weight", ".v_b_proj.weight", ".kv_b_proj.weight"
_FUSED, _SEPARATE = "attn_qkv", ("attn_q", "attn_k", "attn_v")
ROPE_FACTORS = "rope_freqs.weight"
"""What the frequencies of rotary embedding are divided by: settings, that llama.cpp writes as a tensor."""
ROPE_FACTORS_BY_LENGTH = ("rope_factors_short.weight", "rope_factors_long.weight")
"""The same, for contexts up to a length and for longer ones."""

Order = npt.NDArray[np.intp]


@dataclass(frozen=True)
class BlockTensor:
    """As `StoredTensor`, of quantized blocks."""

    dtype: str
    """ggml's name: Q4_K ..."""
    shape: Shape
    data: npt.NDArray[np.uint8]
    """[rows, bytes of a row]"""
    order: Order | None = None
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


@dataclass(frozen=True)
class JoinedHeads:
    """The matrix that keys and values come out of, of a file that has both apart, and the former turned."""

    shape: Shape
    """[heads * (size of a key + size of a value), rank]"""
    heads: int
    keys: StoredTensor | BlockTensor
    """[heads * rank, size of a key]"""
    values: StoredTensor | BlockTensor
    """[heads * size of a value, rank]"""

    dtype = "F32"

    @property
    def parts(self) -> tuple[StoredTensor | BlockTensor, ...]:
        return self.keys, self.values

    def rows_f32(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        rank, size, width = self.shape[1], self.shape[0] // self.heads, self.values.shape[0] // self.heads
        first, last = start // size, -(-stop // size)
        keys = self.keys.rows_f32(first * rank, last * rank).reshape(last - first, rank, -1).swapaxes(1, 2)
        values = self.values.rows_f32(first * width, last * width).reshape(last - first, width, rank)
        both = np.concatenate([keys, values], 1).reshape(-1, rank)
        return both[start - first * size : stop - first * size]

    def f32(self) -> npt.NDArray[np.float32]:
        return self.rows_f32(0, self.shape[0])


FileTensor = StoredTensor | BlockTensor | JoinedHeads | Mxfp4Tensor


def joined_heads(name: str, keys: Any, values: Any) -> JoinedHeads:
    """`keys` [heads, rank, size], `values` [heads, size, rank]. Raises EngineError."""
    shapes = [part.shape for part in (keys, values) if isinstance(part, StoredTensor | BlockTensor)]
    match shapes:
        case [(heads, rank, size), (heads_of_values, width, rank_of_values)] if (heads, rank) == (
            heads_of_values,
            rank_of_values,
        ):
            keys, values = replace(keys, shape=(heads * rank, size)), replace(values, shape=(heads * width, rank))
        case _:
            raise EngineError(f"tensor {name} has no tensor of values that goes with it")
    return JoinedHeads((heads * (size + width), rank), heads, keys, values)


def named_tensors(
    tensors: Mapping[str, StoredBlocks], architecture: Architecture, config: Mapping[str, Any]
) -> dict[str, FileTensor]:
    """By the names that a checkpoint of this architecture has; `config` is its config.json. A name that is not known
    stays as it is, and is refused as a tensor that no part of the model uses."""
    tensors_by_name: dict[str, FileTensor] = {}
    for name, blocks in tensors.items():
        if name in (ROPE_FACTORS, *ROPE_FACTORS_BY_LENGTH) or _is_further(name, config):
            continue
        for renamed, part in _parts(name, blocks, architecture, config):
            tensors_by_name[renamed] = _tensor(part, renamed, architecture, config)
    for name in [name for name in tensors_by_name if name.endswith(_KEYS)]:
        keys, values = tensors_by_name.pop(name), tensors_by_name.pop(name.replace(_KEYS, _VALUES), None)
        tensors_by_name[name.replace(_KEYS, _BOTH)] = joined_heads(name, keys, values)
    return tensors_by_name


def stated_tensors(
    metadata: Mapping[str, Any], architecture: Architecture, config: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """Those of one number, f32, that the metadata have. Raises EngineError."""
    found = {}
    for key, (part, shape) in architecture.stated.items():
        values, layers = metadata.get(key), config["num_hidden_layers"]
        numbers = [value for value in values if isinstance(value, int | float)] if isinstance(values, list) else []
        if len(numbers) != layers:
            raise EngineError(f"the GGUF file has {key}={str(values)[:50]}, which should be {layers} numbers")
        for number, value in enumerate(numbers):
            stored = np.array([value], np.float32).view(np.uint8)
            found[f"{architecture.layers}.{number}.{part}"] = StoredTensor("F32", shape, stored)
    return found


def _is_further(name: str, config: Mapping[str, Any]) -> bool:
    """Whether it is of a layer behind the last one, for multi-token prediction."""
    match, layers = _BLOCK.fullmatch(name), config["num_hidden_layers"]
    return match is not None and layers <= int(match[1]) < layers + config.get("num_nextn_predict_layers", 0)


def _parts(
    name: str, blocks: StoredBlocks, architecture: Architecture, config: Mapping[str, Any]
) -> Iterator[tuple[str, StoredBlocks]]:
    """What a tensor is in a checkpoint of Hugging Face: mostly one, under another name."""
    match = _BLOCK.fullmatch(name)
    part, _, kind = (match[2] if match else name).rpartition(".")
    if not part:
        part, kind = kind, "weight"
    if match is None:
        whole = {"token_embd": architecture.embedding, "output_norm": architecture.norm, "output": architecture.head}
        whole |= architecture.other_parts
        yield from _stacked(name, blocks, f"{whole[part]}.{kind}") if part in whole else [(name, blocks)]
        return
    layer, names = f"{architecture.layers}.{match[1]}", architecture.block_parts
    if match[2] in names:
        yield f"{layer}.{names[match[2]]}", blocks
    elif part == "ssm_ba":
        for separate, some in zip(("in_proj_b", "in_proj_a"), _by_turns(name, blocks, config), strict=True):
            yield f"{layer}.linear_attn.{separate}.{kind}", some
    elif part in architecture.expert_parts:
        yield from _stacked(name, blocks, f"{layer}.{architecture.expert_parts[part]}.{kind}")
    elif part == _FUSED and part not in names:
        for separate, some in zip(_SEPARATE, _split(name, blocks, _qkv_sizes(config)), strict=True):
            yield f"{layer}.{names[separate]}.{kind}", some
    else:
        yield (f"{layer}.{names[part]}.{kind}" if part in names else name), blocks


def _stacked(name: str, blocks: StoredBlocks, renamed: str) -> Iterator[tuple[str, StoredBlocks]]:
    """Each of several matrices, or biases, with its number for the {} in `renamed`; without one, all as they are."""
    if "{}" not in renamed:
        yield renamed, blocks
        return
    if len(blocks.shape) < 2 or not blocks.rows.size:
        raise EngineError(f"tensor {name} has shape {blocks.shape}, which is not that of several matrices")
    for number, rows in enumerate(np.split(blocks.rows, blocks.shape[0])):
        yield renamed.format(number), StoredBlocks(blocks.dtype, blocks.shape[1:], rows)


def _split(name: str, blocks: StoredBlocks, sizes: tuple[int, ...]) -> Iterator[StoredBlocks]:
    """Rows, so many after each other."""
    if not blocks.shape or blocks.shape[0] != sum(sizes):
        raise EngineError(f"tensor {name} has shape {blocks.shape}, which does not match {sizes} rows")
    rows = _by_row(name, blocks)
    for size, end in zip(sizes, np.cumsum(sizes), strict=True):
        yield StoredBlocks(blocks.dtype, (size, *blocks.shape[1:]), rows[end - size : end])


def _by_turns(name: str, blocks: StoredBlocks, config: Mapping[str, Any]) -> Iterator[StoredBlocks]:
    """Of each head of keys some rows of the first, then equally many of the second."""
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if len(blocks.shape) != 2 or blocks.shape[0] != 2 * heads or heads % key_heads:
        raise EngineError(f"tensor {name} has shape {blocks.shape}, which does not match {heads} heads")
    rows = blocks.rows.reshape(key_heads, 2, heads // key_heads, -1)
    for number in range(2):
        yield StoredBlocks(blocks.dtype, (heads, blocks.shape[1]), rows[:, number].reshape(heads, -1))


def _qkv_sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    keys = config["num_key_value_heads"] * config["head_dim"]
    return config["num_attention_heads"] * config["head_dim"], keys, keys


def _tensor(
    blocks: StoredBlocks, name: str, architecture: Architecture, config: Mapping[str, Any]
) -> StoredTensor | BlockTensor | Mxfp4Tensor:
    part = name.removesuffix(".weight").removesuffix(".bias")
    order, rows, shape = _order(part, architecture, config), blocks.rows, blocks.shape
    if order is not None:
        rows = _by_row(name, blocks)
        if len(order) != len(rows):
            raise EngineError(f"tensor {name} has shape {shape}, which does not match {len(order)} rows")
    if blocks.dtype == "MXFP4" and len(shape) == 2:
        whole = StoredTensor("U8", rows.shape, rows.reshape(-1))
        return Mxfp4Tensor((shape[0], shape[1]), Mxfp4Blocks(rows, order), (whole,))
    if blocks.dtype not in _FLOATS:
        return BlockTensor(blocks.dtype, shape, rows, order)
    if order is not None:
        rows = rows[order]
    if part.endswith("shared_expert_gate") and len(shape) == 1:
        shape = (1, *shape)
    if part.endswith((".conv.conv", ".conv1d")) and len(shape) == 2:
        shape = (shape[0], 1, shape[1])
    if part.endswith((".A_log", ".D", ".mamba.norm", ".mixer.norm")):
        shape = (math.prod(shape),)
    stored = StoredTensor(blocks.dtype, shape, rows.reshape(-1))
    if part.endswith(".A_log"):  # the file has what it stands for
        with np.errstate(all="ignore"):
            return StoredTensor("F32", shape, np.log(-stored.f32()).view(np.uint8))
    if architecture.norms_plus_one and name.endswith("norm.weight") and not part.endswith(".linear_attn.norm"):
        return StoredTensor("F32", shape, (stored.f32() - np.float32(1)).view(np.uint8))
    return stored


def _by_row(name: str, blocks: StoredBlocks) -> npt.NDArray[np.uint8]:
    """[rows, bytes of a row]; the values of a vector are its rows."""
    if len(blocks.shape) > 1:
        return blocks.rows
    if blocks.dtype not in _FLOATS:
        raise EngineError(f"tensor {name} is a vector of {blocks.dtype}, which should be one of floats")
    return blocks.rows.reshape(math.prod(blocks.shape), -1)


def _order(part: str, architecture: Architecture, config: Mapping[str, Any]) -> Order | None:
    """Where in the file the rows of a matrix or a bias are; None: in order."""
    heads, key_heads, dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if architecture.pairs_interleaved and part.endswith((".q_proj", ".k_proj")):
        return _halves_from_pairs(heads if part.endswith(".q_proj") else key_heads, dim)
    if architecture.by_key_head and part.endswith(".query_key_value"):
        queries, keys, values = np.split(np.arange((heads + 2 * key_heads) * dim), np.cumsum((heads, key_heads)) * dim)
        return np.concatenate([rows.reshape(key_heads, -1) for rows in (queries, keys, values)], axis=1).reshape(-1)
    return None


def _halves_from_pairs(heads: int, dim: int) -> Order:
    """llama.cpp turns neighbouring rows of a head together, Hugging Face's models row i of the first half and row i
    of the second."""
    return np.arange(heads * dim).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


_BLOCK_BYTES = 17


@dataclass(frozen=True)
class Mxfp4Blocks:
    """As `Mxfp4Layout`. A block is an exponent, then 16 bytes, of which byte j has weight j in its low half and weight
    j + 16 in its high one."""

    rows: Bytes
    """[rows, bytes of a row]"""
    order: npt.NDArray[np.intp] | None = None
    """Where in `rows` each row is; None: in order."""

    is_plain = False

    def codes(self, start: int, stop: int) -> Bytes:
        halves = self._blocks(start, stop)[..., 1:]
        first, second = halves[..., 0::2], halves[..., 1::2]
        low, high = (first & 15) | (second << 4), (first >> 4) | (second & 0xF0)
        return np.concatenate([low, high], axis=-1).reshape(stop - start, -1).view(np.uint8)

    def exponents(self, start: int, stop: int) -> Bytes:
        exponents: Bytes = self._blocks(start, stop)[..., 0]
        return exponents

    def _blocks(self, start: int, stop: int) -> Bytes:
        rows = self.rows[start:stop] if self.order is None else self.rows[self.order[start:stop]]
        return rows.reshape(stop - start, -1, _BLOCK_BYTES)
