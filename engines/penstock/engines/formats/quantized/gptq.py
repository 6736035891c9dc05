"""Checkpoints of GPTQ, as AutoGPTQ and GPTQModel write them, and of AWQ in the layout that AutoAWQ calls gemm.

GPTQ: `qweight` [in * bits / 32, out] has words along the inputs, `qzeros` [groups, out * bits / 32] along the outputs,
`scales` is [groups, out], and `g_idx` [in] says the group of each input. What the first format calls a zero point is
one less than it is: the same constant is added to each word here as in GPTQModel's conversion to the second format.

AWQ: `qweight` [in, out / 8] and `qzeros` [groups, out / 8] have words along the outputs, whose eight levels are in an
order of their own; `scales` is [groups, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
from penstock.engines.formats.quantized.settings import (
    Module,
    Settings,
    choice,
    flag,
    group_size_of,
    refuse,
    split_modules,
)
from penstock.engines.formats.safetensors_file import FLOATS, StoredTensor

_FORMATS = ("gptq", "gptq_v2")
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""By bits: a word whose levels are all 1."""
_REFUSED = {
    "is_marlin_format": "weights in Marlin's order",
    "adapter": "weights with an adapter of their own",
    "rotation": "rotated weights",
}


@dataclass(frozen=True)
class GPTQ:
    """What quantization_config says."""

    bits: int
    group_size: int
    """-1: all columns are one group."""
    symmetric: bool
    zeros_less_one: bool

    name = "gptq"

    def assemble(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | IntegerTensor]:
        """By the names of a checkpoint of floats. Raises EngineError for tensors that do not go together."""
        modules, rest = split_modules(stored, lambda part, _: part == "qweight")
        return rest | {f"{module.name}.weight": self._matrix(module) for module in modules}

    def _matrix(self, module: Module) -> IntegerTensor:
        module.check_parts(("qweight", "qzeros", "scales", "g_idx"))
        per_word = 32 // self.bits
        qweight, scales = module.matrix("qweight", ["I32"]), module.matrix("scales", FLOATS)
        width, rows, groups = qweight.shape[0] * per_word, qweight.shape[1], scales.shape[0]
        if rows % per_word or scales.shape[1] != rows:
            raise EngineError(f"{module.name}: scales {scales.shape} do not match qweight {qweight.shape}")
        qzeros = module.take("qzeros", ["I32"], (groups, rows // per_word))
        layout = _Layout(self, _words(qweight), _words(qzeros), scales)
        size = width if self.group_size == -1 else self.group_size
        order = module.take("g_idx", ["I32"], (width,)).integers() if "g_idx" in module.parts else None
        if order is not None and not order.any():  # of tools that leave it out where columns are in order
            order = None
        group_of = groups_of_columns(module.name, width, groups, size, order)
        return IntegerTensor(self.bits, (rows, width), groups, group_of, layout, tuple(module.parts.values()))


@dataclass(frozen=True)
class _Layout:
    scheme: GPTQ
    qweight: Words
    qzeros: Words
    stored_scales: StoredTensor

    def levels(self, start: int, stop: int) -> Bytes:
        return unpacked(self.qweight[:, start:stop].T, self.scheme.bits)

    def zeros(self, start: int, stop: int) -> Bytes:
        scheme = self.scheme
        half, ones = 1 << (scheme.bits - 1), np.uint32(_ONES[scheme.bits])
        # Some tools write the zero points of the second format and call it the first (vLLM's pull request 38966).
        if scheme.symmetric and (self.qzeros == half * ones).all():
            return unpacked(self.qzeros, scheme.bits).T[start:stop]
        words = self.qzeros + ones if scheme.zeros_less_one else self.qzeros
        return unpacked(words, scheme.bits).T[start:stop]

    def scales(self, start: int, stop: int) -> Floats:
        return self.stored_scales.f32().T[start:stop]


def parse(settings: Settings) -> GPTQ:
    """Raises UnsupportedError, naming what is not supported."""
    refuse(settings, _REFUSED)
    choice(settings, ["pack_dtype"], ["int32"], "int32")
    _check_dynamic(settings.get("dynamic"))
    stored_format = choice(settings, ["checkpoint_format", "format"], _FORMATS, "gptq")
    return GPTQ(
        bits=choice(settings, ["bits"], [2, 4, 8]),
        group_size=group_size_of(settings, ["group_size"]),
        symmetric=flag(settings, "sym", True),
        zeros_less_one=stored_format == "gptq",
    )


def _check_dynamic(rules: Any) -> None:
    """Rules for some modules may say that they are not quantized (`-:`), which their tensors show, too."""
    changed = [str(key) for key in rules or () if not str(key).startswith("-")] if isinstance(rules, dict) else [rules]
    if rules and changed:
        raise UnsupportedError(
            f"quantization_config has dynamic: other settings for {str(changed[0])[:50]} are not supported"
        )


def _words(tensor: StoredTensor) -> Words:
    return tensor.integers().view(np.uint32)


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
            raise EngineError(f"{module.name}: scales {scales.shape} do not match qweight {qweight.shape}")
        qzeros = module.take("qzeros", ["I32"], (groups, qweight.shape[1]))
        layout = _Words(qweight.integers().view(np.uint32), qzeros.integers().view(np.uint32), scales)
        size = width if self.group_size == -1 else self.group_size
        group_of = groups_of_columns(module.name, width, groups, size)
        return IntegerTensor(_BITS, (rows, width), groups, group_of, layout, tuple(module.parts.values()))


@dataclass(frozen=True)
class _Words:
    qweight: Words
    qzeros: Words
    stored_scales: StoredTensor

    def levels(self, start: int, stop: int) -> Bytes:
        return _unpacked_rows(self.qweight, start, stop)

    def zeros(self, start: int, stop: int) -> Bytes:
        return _unpacked_rows(self.qzeros, start, stop)

    def scales(self, start: int, stop: int) -> Floats:
        return self.stored_scales.f32().T[start:stop]


def _unpacked_rows(words: Words, start: int, stop: int) -> Bytes:
    """Of the transposed matrix."""
    first = start // _PER_WORD
    levels = unpacked(words[:, first : -(-stop // _PER_WORD)], _BITS)
    ordered = levels.reshape(len(words), -1, _PER_WORD)[:, :, _ORDER].reshape(len(words), -1)
    return np.ascontiguousarray(ordered.T[start - first * _PER_WORD : stop - first * _PER_WORD])


def parse_awq(settings: Settings) -> AWQ:
    """Raises UnsupportedError, naming what is not supported."""
    lowered = {key: value.lower() if isinstance(value, str) else value for key, value in settings.items()}
    choice(lowered, ["version", "format"], ["gemm"], "gemm")
    choice(settings, ["bits", "w_bit"], [_BITS])
    if not flag(settings, "zero_point", True):
        raise UnsupportedError("quantization_config has zero_point=false, which is not supported for awq")
    return AWQ(group_size_of(settings, ["group_size", "q_group_size"]))
