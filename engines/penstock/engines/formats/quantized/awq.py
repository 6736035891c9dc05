"""AWQ's checkpoints in the layout that AutoAWQ calls gemm.

`qweight` [in, out / 8] and `qzeros` [groups, out / 8] have words along the outputs, whose eight levels are in an order
of their own; `scales` is [groups, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.formats.quantized.integers import (
    Bytes,
    Floats,
    IntegerTensor,
    Words,
    groups_of_columns,
    unpacked,
)
from penstock.engines.formats.quantized.settings import Module, Settings, choice, flag, group_size_of, split_modules
from penstock.engines.formats.safetensors_file import FLOATS, StoredTensor

_BITS, _PER_WORD = 4, 8
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word the level of each output is."""


@dataclass(frozen=True)
class AWQ:
    """What quantization_config says."""

    group_size: int
    """-1: all columns are one group."""

    name = "awq"
    bits = _BITS

    def assemble(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | IntegerTensor]:
        """By the names of a checkpoint of floats. Raises EngineError for tensors that do not go together."""
        modules, rest = split_modules(stored, lambda part, _: part == "qweight")
        return rest | {f"{module.name}.weight": self._matrix(module) for module in modules}

    def _matrix(self, module: Module) -> IntegerTensor:
        module.check_parts(("qweight", "qzeros", "scales"))
        qweight, scales = module.matrix("qweight", ["I32"]), module.matrix("scales", FLOATS)
        width, rows, groups = qweight.shape[0], qweight.shape[1] * _PER_WORD, scales.shape[0]
        if scales.shape[1] != rows:
            raise EngineError(f"{module.name}: scales {scales.shape} do not go with qweight {qweight.shape}")
        qzeros = module.take("qzeros", ["I32"], (groups, qweight.shape[1]))
        layout = _Layout(qweight.integers().view(np.uint32), qzeros.integers().view(np.uint32), scales)
        size = width if self.group_size == -1 else self.group_size
        group_of = groups_of_columns(module.name, width, groups, size)
        return IntegerTensor(_BITS, (rows, width), groups, group_of, layout, tuple(module.parts.values()))


@dataclass(frozen=True)
class _Layout:
    qweight: Words
    qzeros: Words
    stored_scales: StoredTensor

    def levels(self, start: int, stop: int) -> Bytes:
        return _rows(self.qweight, start, stop)

    def zeros(self, start: int, stop: int) -> Bytes:
        return _rows(self.qzeros, start, stop)

    def scales(self, start: int, stop: int) -> Floats:
        return self.stored_scales.f32().T[start:stop]


def _rows(words: Words, start: int, stop: int) -> Bytes:
    """Of the transposed matrix."""
    first = start // _PER_WORD
    levels = unpacked(words[:, first : -(-stop // _PER_WORD)], _BITS)
    ordered = levels.reshape(len(words), -1, _PER_WORD)[:, :, _ORDER].reshape(len(words), -1)
    return np.ascontiguousarray(ordered.T[start - first * _PER_WORD : stop - first * _PER_WORD])


def parse(settings: Settings) -> AWQ:
    """Raises UnsupportedError, naming what is not supported."""
    lowered = {key: value.lower() if isinstance(value, str) else value for key, value in settings.items()}
    choice(lowered, ["version", "format"], ["gemm"], "gemm")
    choice(settings, ["bits", "w_bit"], [_BITS])
    if not flag(settings, "zero_point", True):
        raise UnsupportedError("quantization_config has zero_point=false, which is not supported for awq")
    return AWQ(group_size_of(settings, ["group_size", "q_group_size"]))
