"""Quantized checkpoints out of folders with floats, packed as the definitions of their formats say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset15 as ops
import torch
from safetensors.torch import load_file, save_file

from penstock.engines.openvino.weights import Weights

Ints = npt.NDArray[np.int64]
Tensors = dict[str, torch.Tensor]
GROUP = 32


@dataclass(frozen=True)
class Levels:
    """A matrix [rows, width] in integers: (level - zero) * scale."""

    levels: Ints
    zeros: Ints
    """[rows, groups]"""
    scales: npt.NDArray[np.float32]
    """[rows, groups], numbers of float16"""
    group_of: Ints
    """Of each column."""
    bits: int

    def floats(self) -> npt.NDArray[np.float32]:
        return (self.levels - self.zeros[:, self.group_of]).astype(np.float32) * self.scales[:, self.group_of]


def round_to_levels(
    matrix: npt.NDArray[np.float32], bits: int, *, symmetric: bool, group_of: Ints | None = None, group: int = GROUP
) -> Levels:
    """By the least and greatest value of each group."""
    rows, width = matrix.shape
    columns = np.arange(width) // group if group_of is None else group_of
    count, top = int(columns.max()) + 1, 2**bits - 1
    zeros, scales = np.zeros((rows, count), np.int64), np.zeros((rows, count), np.float32)
    for number in range(count):
        part = matrix[:, columns == number]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            scales[:, number] = np.maximum(-low, high) / (top // 2)
            zeros[:, number] = (top + 1) // 2
        else:
            scales[:, number] = (high - low) / top
            zeros[:, number] = np.rint(-low / scales[:, number])
    scales = scales.astype(np.float16).astype(np.float32)
    levels = np.rint(matrix / scales[:, columns]) + zeros[:, columns]
    return Levels(np.clip(levels, 0, top).astype(np.int64), zeros, scales, columns, bits)


def in_words(values: Ints, bits: int, axis: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """32 / bits values of an axis in each int32, the first in the lowest bits; `order`: which value of a word is in
    each place."""
    count = 32 // bits
    moved = np.moveaxis(values, axis, -1)
    moved = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, -moved.shape[-1] % count)])
    parts = moved.reshape(*moved.shape[:-1], -1, count)
    words = sum(parts[..., source] << (bits * place) for place, source in enumerate(order or range(count)))
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)).astype(np.uint32).view(np.int32))


def floats(values: npt.NDArray[Any], dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(dtype)


def gptq(matrix: Levels, *, less_one: bool = True) -> Tensors:
    return {
        "qweight": in_words(matrix.levels.T, matrix.bits, 0),
        "qzeros": in_words((matrix.zeros.T - less_one) % 2**matrix.bits, matrix.bits, 1),
        "scales": floats(matrix.scales.T),
        "g_idx": torch.from_numpy(matrix.group_of.astype(np.int32)),
    }


def awq(matrix: Levels) -> Tensors:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": in_words(matrix.levels.T, 4, 1, order),
        "qzeros": in_words(matrix.zeros.T, 4, 1, order),
        "scales": floats(matrix.scales.T),
    }


def packed(matrix: Levels, *, symmetric: bool, ordered: bool = False) -> Tensors:
    """compressed-tensors' pack-quantized."""
    found = {
        "weight_packed": in_words(matrix.levels, matrix.bits, 1),
        "weight_shape": torch.tensor(matrix.levels.shape),
        "weight_scale": floats(matrix.scales),
    }
    if not symmetric:
        found["weight_zero_point"] = in_words(matrix.zeros, matrix.bits, 0)
    if ordered:
        found["weight_g_idx"] = torch.from_numpy(matrix.group_of.astype(np.int32))
    return found


def plain_int8(matrix: Levels) -> Tensors:
    """compressed-tensors' int-quantized."""
    return {
        "weight": torch.from_numpy((matrix.levels - 128).astype(np.int8)),
        "weight_scale": floats(matrix.scales, torch.float32),
        "input_scale": torch.ones(1),
    }


def fp8(
    matrix: npt.NDArray[np.float32], block: tuple[int, int] | None, name: str = "weight_scale"
) -> tuple[Tensors, npt.NDArray[np.float32]]:
    """The tensors, and what they stand for. Without a block each row has a scale."""
    rows, width = matrix.shape
    height, length = block or (1, width)
    scales = np.zeros((-(-rows // height), -(-width // length)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = matrix[i * height : (i + 1) * height, j * length : (j + 1) * length]
            scales[i, j] = np.abs(part).max() / 448
    whole = scales.repeat(height, 0)[:rows].repeat(length, 1)[:, :width]
    values = torch.from_numpy(matrix / whole).to(torch.float8_e4m3fn)
    return {"weight": values, name: torch.from_numpy(scales)}, values.float().numpy() * whole


def bnb_int8(matrix: Levels) -> Tensors:
    return {
        "weight": torch.from_numpy((matrix.levels - 128).astype(np.int8)),
        "SCB": torch.from_numpy(matrix.scales[:, 0] * 127),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def bnb_nf4(matrix: npt.NDArray[np.float32], *, nested: bool, block: int = 48) -> tuple[Tensors, Any]:
    """With any table of 16 values; blocks go over the ends of rows."""
    table = np.linspace(-1, 1, 16, dtype=np.float32) ** 3
    flat = matrix.reshape(-1)
    count = -(-len(flat) // block)
    scales = np.array([np.abs(flat[i * block : (i + 1) * block]).max() for i in range(count)], np.float32)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "shape": list(matrix.shape), "dtype": "bfloat16"}
    found: Tensors = {}
    if nested:
        offset, inner = float(scales.mean()), np.linspace(-1, 1, 256, dtype=np.float32)
        outer = np.array([np.abs(scales[i : i + 7] - offset).max() for i in range(0, count, 7)], np.float32)
        whole = outer.repeat(7)[:count]
        codes = np.abs((scales - np.float32(offset))[:, None] / whole[:, None] - inner).argmin(1).astype(np.uint8)
        scales = inner[codes] * whole + np.float32(offset)
        state |= {"nested_blocksize": 7, "nested_offset": offset, "nested_dtype": "float32"}
        found = {"weight.nested_absmax": torch.from_numpy(outer), "weight.nested_quant_map": torch.from_numpy(inner)}
        found["weight.absmax"] = torch.from_numpy(codes)
    else:
        found["weight.absmax"] = torch.from_numpy(scales)
    of_each = scales.repeat(block)[: len(flat)]
    places = np.abs((flat / of_each)[:, None] - table).argmin(1).astype(np.uint8)
    found["weight"] = torch.from_numpy((places[0::2] << 4) | places[1::2])[:, None]
    found["weight.quant_map"] = torch.from_numpy(table)
    text = json.dumps(state).encode()
    found["weight.quant_state.bitsandbytes__nf4"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return found, (table[places] * of_each).reshape(matrix.shape)


Pack = Callable[[str, npt.NDArray[np.float32]], tuple[Tensors, npt.NDArray[np.float32]]]
"""Of a matrix and its name, the tensors, and what they stand for."""


def write_quantized(
    folder: Path, target: Path, config: dict[str, Any], pack: Pack, endings: tuple[str, ...] = ("_proj",)
) -> Path:
    """The model of `folder` with the matrices of modules that end so packed, in `target`, which is returned; and with
    what these stand for, in a folder beside it: `reference_of(target)`."""
    weights = load_file(folder / "model.safetensors")
    stored, rounded = {}, dict(weights)
    for name, values in weights.items():
        module, _, part = name.rpartition(".")
        if part != "weight" or not module.endswith(endings):
            stored[name] = values
            continue
        tensors, meant = pack(name, values.float().numpy())
        stored |= {f"{module}.{part}": tensor for part, tensor in tensors.items()}
        rounded[name] = torch.from_numpy(np.ascontiguousarray(meant))
    return _save_both(folder, target, config, stored, rounded)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def mxfp4(values: npt.NDArray[np.float32]) -> tuple[Tensors, npt.NDArray[np.float32]]:
    """Blocks and scales of [..., width], and what they stand for: each group's greatest value gets exponent 2, which is
    the largest that e2m1 has."""
    grouped = values.reshape(*values.shape[:-1], -1, GROUP)
    exponents = np.clip(np.floor(np.log2(np.abs(grouped).max(-1))) - 2, -127, 127)
    scales = (2.0**exponents)[..., None].astype(np.float32)
    codes = np.abs((grouped / scales)[..., None] - E2M1).argmin(-1).astype(np.uint8)
    packed = {
        "blocks": torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << 4),
        "scales": torch.from_numpy((exponents + 127).astype(np.uint8)),
    }
    return packed, (E2M1[codes] * scales).reshape(values.shape)


def write_mxfp4(folder: Path, target: Path) -> Path:
    """As `write_quantized`: GPT-OSS of `folder`, whose experts are [experts, in, out] there, and [experts, out, in] as
    they are published."""
    weights = load_file(folder / "model.safetensors")
    stored, rounded = {}, dict(weights)
    for name, values in weights.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            tensors, meant = mxfp4(values.float().numpy().swapaxes(1, 2))
            stored |= {f"{name}_{part}": tensor for part, tensor in tensors.items()}
            rounded[name] = torch.from_numpy(meant.swapaxes(1, 2).copy())
        else:
            stored[name] = values
    return _save_both(folder, target, {"quant_method": "mxfp4"}, stored, rounded)


def _save_both(folder: Path, target: Path, config: dict[str, Any], stored: Tensors, rounded: Tensors) -> Path:
    for path, tensors in ((target, stored), (reference_of(target), rounded)):
        shutil.copytree(folder, path)
        save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    settings = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
    return target


def reference_of(target: Path) -> Path:
    return target.with_name(target.name + "-reference")


def product_and_types(
    weights: Weights, name: str, shape: tuple[int, int], x: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float32], set[str]]:
    """x times the transposed matrix, computed by OpenVINO in f32, and the types of the graph's constants."""
    rows = ops.parameter(ov.PartialShape([-1, shape[1]]), ov.Type.f32)
    model = ov.Model([ops.result(weights.project(rows, name, shape))], [rows], "m")
    constants = [node for node in model.get_ordered_ops() if node.get_type_name() == "Constant"]
    types = {node.get_element_type().get_type_name() for node in constants}
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    return ov.Core().compile_model(model, "CPU", exact)(x)[0], types
