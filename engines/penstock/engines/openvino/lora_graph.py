"""What LoRA adapters add to the decoder's projections, as a part of its graph.

    y += select(mask, x @ A.T, 0) @ B

A [R, inputs] and B [R, outputs] hold rows of several adapters, B with the adapter's scaling; `mask` [T, R] keeps the
rows of each token's own adapter. Inputs, beside those of `decoder_inputs`: lora_slots [T] i32, the number of each
token's adapter or 0; for each kind of projection (q_proj ...) lora_rows.KIND [R] i32, the number of each row's adapter;
and for each projection lora_a.PATH and lora_b.PATH in the precision of the computation. R may be 0: then nothing is
multiplied.

What is added to the logits is an output of its own, of some of the tokens alone: few adapters change the output layer,
and adding zeros to all logits takes long. lora_logits_at [M] i64 has the places of these tokens among those whose
logits are computed; the output has their rows, [M, vocab] f32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as ops

Node = Any
AddInput = Callable[[str, object, list[int]], Node]

SLOTS = "lora_slots"
LOGITS_AT = "lora_logits_at"
OUTPUT_LAYER = "lm_head"
PRECISIONS = {"bf16": ov.Type.bf16, "f16": ov.Type.f16, "f32": ov.Type.f32}


@dataclass(frozen=True, slots=True)
class Projection:
    """That adapters may change: `inputs` -> `outputs`."""

    inputs: int
    outputs: int
    kind: str
    """Projections of a kind have equally many rows of adapters."""


class LoraGraph:
    """Adds adapters to projections, one after the other, and notes which there are."""

    def __init__(self, precision: str, add_input: AddInput) -> None:
        """`add_input` gives the model an input of this name, type and shape."""
        self.projections: dict[str, Projection] = {}
        """By path."""
        self._type = PRECISIONS[precision]
        self._add_input = add_input
        self._slots = add_input(SLOTS, np.int32, [-1])
        self._masks: dict[str, Node] = {}
        self._zero = ops.constant(np.float32(0))

    def add(self, y: Node, x: Node, path: str, out: int, inner: int) -> Node:
        """`y` [T, out], what the projection gives for x [T, inner], with what adapters add."""
        return ops.add(y, self._added(x, path, out, inner, self._slots))

    def logits(self, x: Node, wanted: Node, out: int, inner: int) -> Node:
        """The output. `x` [N, inner], what the output layer is given for the tokens `wanted` [N]."""
        at = self._add_input(LOGITS_AT, np.int64, [-1])
        slots = ops.gather(self._slots, ops.gather(wanted, at, _i64(0)), _i64(0))
        return self._added(ops.gather(x, at, _i64(0)), OUTPUT_LAYER, out, inner, slots)

    def _added(self, x: Node, path: str, out: int, inner: int, slots: Node) -> Node:
        """`slots` of the tokens of x."""
        kind = path.rpartition(".")[2]
        self.projections[path] = Projection(inner, out, kind)
        if kind not in self._masks:
            rows = self._add_input(f"lora_rows.{kind}", np.int32, [-1])
            self._masks[kind] = ops.equal(ops.unsqueeze(slots, _i64(1)), ops.unsqueeze(rows, _i64(0)))
        a = ops.convert(self._add_input(f"lora_a.{path}", self._type, [-1, inner]), "f32")
        b = ops.convert(self._add_input(f"lora_b.{path}", self._type, [-1, out]), "f32")
        # Not a multiplication with 0 and 1: what overflows with another adapter's rows would become NaN.
        own = ops.select(self._masks[kind], ops.matmul(x, a, False, True), self._zero)
        return ops.matmul(own, b, False, False)


def _i64(value: int) -> Node:
    return ops.constant(np.int64(value))
