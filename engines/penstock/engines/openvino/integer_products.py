"""Products with matrices in 8 and 4 bits, in a graph.

Where the plugin unpacks integers to f32 (AVX2), wide matrices are multiplied in parts. With 4,608 to 8,192 columns it
(2026.4) takes about twice as long for each weight as with 2,048 in products of 16 and 64 rows, and 1.3 times as long in
those of 4: what it has unpacked leaves the cache before it is multiplied. With more columns it does not. One row takes
up to 1.1 times as long in parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.openvino.graph_nodes import Node, constant, i64, parts
from penstock.engines.openvino.weight_cache import Array

_WIDE = range(2561, 8193)
"""Columns of a matrix that is multiplied in parts. With 2,560 products of 4 and 16 rows take 0.9 of the time in parts,
those of 1 and 512 rows 1.05; with 3,584 0.8 and 1.04."""
_WIDEST = 2048
"""Columns of a part, at most. Parts of 1,152 were no quicker, and slower in products of one row."""
_ROUNDED = 128
"""Columns of a part are a multiple of this where scales leave the choice."""
DIVISION = f"{_WIDE.start} to {_WIDE[-1]} columns in parts of {_WIDEST}"
"""Which matrices are in parts, and in which, for the key of weights that are kept on disk."""


def offset_and_scaled(arrays: Sequence[Array], shape: Sequence[int], stored: ov.Type) -> Node:
    """The matrix, f32, of values, zero points and scales [rows, groups, 1]. The plugin knows just this form of it: zero
    points of the type of the values, the arithmetic in f16, and the groups joined after it."""
    values, zeros, scales = arrays
    rows, groups, _ = scales.shape
    whole = constant(values, (rows, groups, shape[1] // groups), stored)
    offset = ops.subtract(ops.convert(whole, "f16"), ops.convert(constant(zeros, scales.shape, stored), "f16"))
    return _scaled(offset, scales, shape)


def _scaled(values: Node, scales: Array, shape: Sequence[int]) -> Node:
    """The matrix, f32, of values f16 [rows, groups, size] and scales [rows, groups, 1]."""
    scaled = ops.multiply(values, constant(scales, scales.shape, ov.Type.f16))
    return ops.convert(ops.reshape(scaled, np.array(shape), False), "f32")


def groups_in_parts(arrays: Sequence[Array], width: int) -> Sequence[Array]:
    """What `with_zeros_apart` gives of a matrix with `width` columns: values and scales of each part, then the shares
    of all, if there are any."""
    if not is_wide(width):
        return arrays
    values, scales, *shares = arrays
    rows, groups, _ = scales.shape
    bounds = _bounds(groups, width // groups)
    grouped = values.reshape(rows, groups, -1)
    pairs = [(grouped[:, begin:end].reshape(-1), scales[:, begin:end].copy()) for begin, end in pairwise(bounds)]
    return [*(array for pair in pairs for array in pair), *shares]


def signed_product(x: Node, arrays: Sequence[Array], shape: Sequence[int]) -> Node:
    """x [T, in] times the transposed matrix of `groups_in_parts`."""
    pairs = list(zip(arrays[::2], arrays[1::2], strict=False))  # without the shares, which are alone at the end
    groups = sum(scales.shape[1] for _, scales in pairs)
    rows, size = shape[0], shape[1] // groups
    matrices = []
    for values, scales in pairs:
        of_part = scales.shape[1]
        signed = ops.convert(constant(values, (rows, of_part, size), ov.Type.i4), "f16")
        matrices.append((_scaled(signed, scales, (rows, of_part * size)), of_part * size))
    y = _sum_of_products(x, matrices)
    if len(arrays) == 2 * len(pairs):
        return y
    sums = ops.reduce_sum(ops.reshape(x, i64([-1, groups, size]), False), i64([2]), False)
    return ops.add(y, ops.matmul(sums, constant(arrays[-1], (rows, groups), ov.Type.f32), False, True))


def rows_in_parts(values: Array, scales: Array) -> Sequence[Array]:
    """Of int8 [rows, width] with scales [rows, 1]: the scales, then the values of each part."""
    bounds = _bounds(-(-values.shape[1] // _ROUNDED), _ROUNDED)
    return [scales, *(values[:, a * _ROUNDED : b * _ROUNDED].copy() for a, b in pairwise(bounds))]


def rows_product(x: Node, arrays: Sequence[Array]) -> Node:
    """x [T, in] times the transposed matrix of `rows_in_parts`."""
    scales, *of_parts = arrays
    matrices = []
    for values in of_parts:
        whole = ops.convert(constant(values, values.shape, ov.Type.i8), "f32")
        matrices.append((ops.multiply(whole, ops.constant(scales)), values.shape[1]))
    return _sum_of_products(x, matrices)


def is_wide(width: int) -> bool:
    return width in _WIDE


def _bounds(count: int, size: int) -> list[int]:
    """Of `count` groups of so many columns: where parts begin, and the end; all have about as many groups."""
    num_parts = min(count, -(-count * size // _WIDEST))
    return [count * part // num_parts for part in range(num_parts + 1)]


def _sum_of_products(x: Node, matrices: Sequence[tuple[Node, int]]) -> Node:
    """`matrices`: those of the parts, in order, and how many columns each has."""
    if len(matrices) == 1:
        return ops.matmul(x, matrices[0][0], False, True)
    columns = parts(x, [width for _, width in matrices], 1)
    products = [ops.matmul(some, matrix, False, True) for some, (matrix, _) in zip(columns, matrices, strict=True)]
    return reduce(ops.add, products)
