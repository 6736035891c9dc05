"""LoRA adapters beside the base model: a part of the decoder's graph, and their matrices in memory that it reads in
place.

    y += select(mask, x @ A.T, 0) @ B

Each projection has one A [R, inputs] and one B [R, outputs], with the adapters' scaling, for all adapters: `max_rank`
rows for each place that an adapter may take. A step is given the R rows from its first adapter's to its last one's;
`mask` [T, R] keeps the rows of each token's own adapter. Memory is taken up by adapters as they are installed, and by
none for projections that no adapter changes.

Inputs, beside those of `decoder_inputs`: lora_slots [T] i32, the number of each token's adapter or 0; for each kind of
projection (q_proj ...) lora_rows.KIND [R] i32, the number of each row's adapter; and for each projection lora_a.PATH
and lora_b.PATH in the precision of the computation. R may be 0: then nothing is multiplied.

What is added to the logits is an output of its own, of some of the tokens alone: few adapters change the output layer,
and adding zeros to all logits takes long. lora_logits_at [M] i64 has the places of these tokens among those whose
logits are computed; the output has their rows, [M, vocab] f32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.errors import InvalidRequestError
from penstock.engines.formats.adapter_files import LowRank, read_adapter
from penstock.engines.kit.adapter_slots import AdapterSlots, fitting_layers
from penstock.engines.kit.batch import Ints
from penstock.engines.openvino.graph_nodes import Node, i64
from penstock.engines.openvino.weights import to_bf16

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

    def logits(self, x: Node, tokens: Node, out: int, inner: int) -> Node:
        """The output. `x` [N, inner], what the output layer is given for the tokens `tokens` [N]."""
        at = self._add_input(LOGITS_AT, np.int64, [-1])
        slots = ops.gather(self._slots, ops.gather(tokens, at, i64(0)), i64(0))
        return self._added(ops.gather(x, at, i64(0)), OUTPUT_LAYER, out, inner, slots)

    def _added(self, x: Node, path: str, out: int, inner: int, slots: Node) -> Node:
        """`slots` of the tokens of x."""
        kind = path.rpartition(".")[2]
        self.projections[path] = Projection(inner, out, kind)
        if kind not in self._masks:
            rows = self._add_input(f"lora_rows.{kind}", np.int32, [-1])
            self._masks[kind] = ops.equal(ops.unsqueeze(slots, i64(1)), ops.unsqueeze(rows, i64(0)))
        a = ops.convert(self._add_input(f"lora_a.{path}", self._type, [-1, inner]), "f32")
        b = ops.convert(self._add_input(f"lora_b.{path}", self._type, [-1, out]), "f32")
        # Not a multiplication with 0 and 1: what overflows with another adapter's rows would become NaN.
        own = ops.select(self._masks[kind], ops.matmul(x, a, False, True), self._zero)
        return ops.matmul(own, b, False, False)


Values = npt.NDArray[Any]
Pairs = dict[str, tuple[Values, Values]]
"""A [rank, inputs] and scaling * B.T [rank, outputs] by path, in the precision of the computation."""
Rows = tuple[tuple[int, int], ...]
"""For each kind of projection, which rows a step is given: from the first up to the second."""

_ITEMS: dict[str, type[np.generic]] = {"bf16": np.uint16, "f16": np.float16, "f32": np.float32}
_NOBODY = -1
"""Of rows without an adapter: no token has this number."""


@dataclass(frozen=True, slots=True)
class _Installed:
    number: int
    place: int
    ranks: Mapping[str, int]
    """By kind: the highest of its layers."""


class OpenVINOAdapters:
    """Has AdapterHost's verbs, and binds the adapters of a step to infer requests.

    Rows of a place may be written while a step reads them: its tokens have none of these numbers, or nothing that they
    give is used any more.
    """

    def __init__(self, projections: Mapping[str, Projection], max_loras: int, max_rank: int, precision: str) -> None:
        """`projections` by path; max_loras 0: no LoRA."""
        self._projections = projections
        self._max_loras = max_loras
        self._max_rank = max_rank
        self._precision = precision
        self._slots = AdapterSlots[_Installed](max_loras)
        self._by_number: dict[int, _Installed] = {}
        rows = max_loras * max_rank
        self._kinds = tuple(dict.fromkeys(projection.kind for projection in projections.values()))
        self._owners = {kind: np.full(rows, _NOBODY, np.int32) for kind in self._kinds}
        """[rows]: the number of each row's adapter."""
        item = _ITEMS[precision]
        self._pairs: Pairs = {
            path: (np.zeros((rows, projection.inputs), item), np.zeros((rows, projection.outputs), item))
            for path, projection in projections.items()
        }

    @property
    def reserved_bytes(self) -> int:
        """What all places take if each holds an adapter of the highest rank for every projection."""
        return sum(a.nbytes + b.nbytes for a, b in self._pairs.values())

    def prepare(self, key: str, folder: Path) -> Pairs:
        """`AdapterHost.prepare_adapter`. UnsupportedError when the model was loaded without room for adapters."""
        self._slots.check_free(key)
        layers = fitting_layers(read_adapter(folder, self._max_rank), self._projections)
        return {path: self._converted(path, layer) for path, layer in layers.items()}

    def install(self, key: str, pairs: Pairs) -> None:
        """`AdapterHost.install_adapter`."""
        self._slots.check_free(key)
        taken = {adapter.place for adapter in self._slots.held.values()}
        place = next(place for place in range(self._max_loras) if place not in taken)
        ranks: dict[str, int] = {}
        for path, (a, _) in pairs.items():
            kind = self._projections[path].kind
            ranks[kind] = max(len(a), ranks.get(kind, 0))
        installed = _Installed(self._slots.new_number(), place, ranks)
        begin = place * self._max_rank
        for path, whole in self._pairs.items():
            pair = pairs.get(path)
            filled = begin + (0 if pair is None else len(pair[0]))
            end = begin + ranks.get(self._projections[path].kind, 0)
            for side, rows in enumerate(whole):
                if pair is not None:
                    rows[begin:filled] = pair[side]
                rows[filled:end] = 0
        for kind, rank in ranks.items():
            self._owners[kind][begin : begin + rank] = installed.number
        self._by_number[installed.number] = installed
        self._slots.hold(key, installed)

    def unload(self, key: str) -> None:
        gone = self._slots.held.pop(key, None)
        if gone is None:
            return
        del self._by_number[gone.number]
        begin = gone.place * self._max_rank
        for owners in self._owners.values():
            owners[begin : begin + self._max_rank] = _NOBODY

    def slot(self, key: str) -> int | None:
        """`Model.adapter_slot`."""
        adapter = self._slots.held.get(key)
        return None if adapter is None else adapter.number

    def choose(self, slots: Ints, last: Rows = ()) -> Rows:
        """What a batch needs, whose requests have these `slots` [S]. `last`: what the batch before had, which may do
        for this one."""
        numbers = np.unique(slots[slots > 0]).tolist()
        used = [self._by_number[number] for number in numbers if number in self._by_number]
        last = last or ((0, 0),) * len(self._kinds)
        return tuple(self._rows(kind, used, before) for kind, before in zip(self._kinds, last, strict=True))

    def _rows(self, kind: str, used: list[_Installed], last: tuple[int, int]) -> tuple[int, int]:
        """A few rows more take less time than binding others, whose number is a new shape for the kernels."""
        having = [adapter for adapter in used if kind in adapter.ranks]
        begin = min((adapter.place * self._max_rank for adapter in having), default=0)
        end = max((adapter.place * self._max_rank + adapter.ranks[kind] for adapter in having), default=0)
        covers = last[0] <= begin and end <= last[1]
        return last if covers and last[1] - last[0] <= 2 * (end - begin) else (begin, end)

    def change_logits(self, rows: Rows) -> bool:
        """Whether some adapter of a batch that is given `rows` changes the output layer."""
        begin, end = rows[self._kinds.index(OUTPUT_LAYER)]
        return begin < end

    def bind(self, request: Any, rows: Rows) -> None:
        """From now on the infer request reads these rows."""
        by_kind = dict(zip(self._kinds, rows, strict=True))
        for kind, (begin, end) in by_kind.items():
            request.set_tensor(f"lora_rows.{kind}", ov.Tensor(self._owners[kind][begin:end], shared_memory=True))
        for path, (a, b) in self._pairs.items():
            begin, end = by_kind[self._projections[path].kind]
            request.set_tensor(f"lora_a.{path}", self._tensor(a[begin:end]))
            request.set_tensor(f"lora_b.{path}", self._tensor(b[begin:end]))

    def _tensor(self, values: Values) -> ov.Tensor:
        return ov.Tensor(values, ov.Shape(values.shape), PRECISIONS[self._precision])

    def _converted(self, path: str, layer: LowRank) -> tuple[Values, Values]:
        with np.errstate(over="ignore", invalid="ignore"):
            b = np.ascontiguousarray(layer.b.f32().T) * np.float32(layer.scaling)
            return self._in_precision(path, layer.a.f32()), self._in_precision(path, b)

    def _in_precision(self, path: str, values: npt.NDArray[np.float32]) -> Values:
        converted = to_bf16(values) if self._precision == "bf16" else values.astype(_ITEMS[self._precision])
        finite = (converted & 0x7F80 != 0x7F80) if self._precision == "bf16" else np.isfinite(converted)
        if not finite.all():
            raise InvalidRequestError(f"the adapter's {path} is not finite in the model's precision")
        return converted
