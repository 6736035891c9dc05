"""Number types of a model on OpenVINO: one pure function decides them, from the CPU, the settings and the model.

Runner, drafts, encoders, the memory estimate and the identity of an engine all read its result. `trials.settle` lets it
prove itself on this machine before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.engines.host.cpu import Cpu
from penstock.engines.openvino.config import (
    QUANTIZED,
    Activations,
    KVCacheType,
    OpenVINOConfig,
    Precision,
    WeightsType,
)

QUANTIZED_KV = ("u8", "u8-u4", "u4")
KV_ON_X86 = {
    "bf16": ("bf16", *QUANTIZED_KV),
    "f16": ("f16", *QUANTIZED_KV),
    "f32": ("f32", "f16", *QUANTIZED_KV),
}
"""What the plugin's attention kernels take, by precision of the computation; the first is the default."""
KV_ON_ARM = {"f16": ("u8",), "f32": ("f32", "u8")}

_LEAST_GROUP, _MOST_GROUP = 16, 40
"""Values of a head that share a scale in 4 bits. Smaller groups lose less: with 32 values in a group, divergence on the
demo model is a sixth less than with all 64 of a head. With 16, scales and zero points take as many bits as values."""
_BYTES = {"u8": 1.0, "u4": 0.5}
_SCALE_BYTES = 8
"""Of a scale and a zero point."""
_BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class KVType:
    """Of keys and of values: bf16, f16, f32, u8 or u4.

    In 8 bits, values have a scale and a zero point for each token and head; in 4 bits one for each `group` values of
    them. Keys in 8 and 4 bits have them for each channel of a block.
    """

    name: str
    """As in the settings."""
    key: str
    value: str
    group: int
    """0: neither is in 4 bits."""

    @property
    def properties(self) -> dict[str, Any]:
        """Of the plugin."""
        properties: dict[str, Any] = {"KEY_CACHE_PRECISION": self.key, "VALUE_CACHE_PRECISION": self.value}
        if self.key == "u4":
            # Where the plugin has no scales for each channel: not on x86.
            properties["KEY_CACHE_GROUP_SIZE"] = self.group
        if self.value == "u4":
            properties["VALUE_CACHE_GROUP_SIZE"] = self.group
        return properties


def kv_cache_type(
    wish: KVCacheType, precision: str, head_size: int, types: Mapping[str, Sequence[str]] = KV_ON_X86
) -> KVType:
    """`types`: those that go with each precision.

    Raises InvalidRequestError for a type that does not go with the precision of the computation, UnsupportedError for
    one that does not go with the model's heads.
    """
    allowed = types[precision]
    name = allowed[0] if wish == "auto" else wish
    if name not in allowed:
        raise InvalidRequestError(
            f"kv_cache_dtype={name} cannot be combined with dtype={precision}; {', '.join(allowed)} can",
            param="kv_cache_dtype",
        )
    key, value = _key_and_value(name)
    if value != "u4":
        return KVType(name, key, value, 0)
    if head_size % 2:
        raise UnsupportedError(
            f"kv_cache_dtype={name} needs an even head size, and this model's is {head_size}; use u8",
            param="kv_cache_dtype",
        )
    return KVType(name, key, value, group_size(head_size))


def group_size(head_size: int) -> int:
    """How many of an even number of values share a scale in 4 bits."""
    fitting = (size for size in range(_MOST_GROUP, _LEAST_GROUP - 1, -2) if head_size % size == 0)
    return next(fitting, head_size)


def quantized_bytes(name: str, head_size: int) -> float:
    """Of a number in a cache of one of the quantized types, on average over keys and values."""
    key, value = _key_and_value(name)
    sharing = group_size(head_size) if value == "u4" else head_size
    return (_BYTES[key] + _SCALE_BYTES / _BLOCK_TOKENS + _BYTES[value] + _SCALE_BYTES / sharing) / 2


def _key_and_value(name: str) -> tuple[str, str]:
    key, _, value = name.partition("-")
    return key, value or key


Dtype = Literal["bf16", "f16", "f32"]
IntegersType = Literal["int8", "int4"]

_X86 = ("x86_64", "amd64", "i686")
_BF16 = {"avx512_bf16", "amx_bf16"}
_F16 = {"avx512_fp16", "amx_fp16"}
_AMX = "amx_tile"
_LEAST_BITS_FOR_INT8 = 5.2
"""GGUF's Q4_K_M has 4.9, its Q5_0 5.5: what has more is not rounded to 4 bits."""
_NO_INSTRUCTIONS = "this CPU has no instructions for it"


@dataclass(frozen=True)
class CpuFacts:
    """What a CPU computes in."""

    dtypes: tuple[Dtype, ...]
    """The first is what `dtype=auto` means. f32 is always there."""
    rounds: frozenset[Dtype]
    """Where weights in 8 and 4 bits are multiplied with activations that are rounded to int8."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Why it does not compute in others, by dtype."""
    kv_types: Mapping[str, Sequence[str]] = field(default_factory=lambda: KV_ON_X86)
    """Those of KV caches, by dtype; the first is the default."""
    has_attention: bool = True
    """OpenVINO has paged attention for it."""
    unpacks_i4: bool = True
    """It unpacks signed weights in 4 bits while it multiplies them with floats."""

    def unpacks(self, integers: IntegersType | None, activations: str) -> bool:
        """As `Numerics.unpacks` has it."""
        return integers is not None and activations == "f32" and self.unpacks_i4

    def without(self, dtype: Dtype, why: str) -> CpuFacts:
        left: tuple[Dtype, ...] = tuple(other for other in self.dtypes if other != dtype)
        return replace(self, dtypes=left, rounds=self.rounds - {dtype}, failures={**self.failures, dtype: why})

    def without_rounding(self, dtype: Dtype) -> CpuFacts:
        return replace(self, rounds=self.rounds - {dtype})


@dataclass(frozen=True)
class Wish:
    """The settings of `OpenVINOConfig` that are about number types."""

    dtype: Precision = "auto"
    weights: WeightsType = "auto"
    activations: Activations = "auto"
    kv_cache_dtype: KVCacheType = "auto"

    @classmethod
    def of(cls, config: OpenVINOConfig) -> Wish:
        return cls(config.dtype, config.weights, config.activations, config.kv_cache_dtype)


@dataclass(frozen=True)
class StoredTypes:
    """Forms in which a checkpoint has its matrices, beside floats."""

    integers: IntegersType | None = None
    """Integers that are held as they are, unless another type is set; int4 may be beside int8."""
    block_bits: float | None = None
    """Mean bits of weights in quantized blocks, which the graph gets in another form. None: there are none."""
    has_mxfp4: bool = False
    """In experts; its kernels round no activations."""


@dataclass(frozen=True)
class ModelFacts:
    """What decides number types of a model."""

    stored: StoredTypes = StoredTypes()
    head_size: int = 0
    """Of its paged attention; 0: it is an encoder, which has none, and no KV cache."""
    is_capped: bool = False
    """Its attention caps scores, see `attention`: in bf16 they would be off by up to an eighth."""
    is_draft: bool = False
    """It computes a few tokens of each request, and keeps its weights once."""
    is_exported: bool = False
    """Its matrices may have groups of any size, so the plugin chooses which activations share a scale."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """Number types that a model is computed in."""

    dtype: Dtype
    """Of the computation."""
    activations: str
    """What matrices are multiplied with: int8, or `dtype`."""
    kv: KVType | None
    """None: it has no KV cache."""
    weights: WeightsType = "auto"
    """How matrices are held; auto: as the checkpoint has them."""
    integers: IntegersType | None = None
    """Type of matrices in 8 or 4 bits; int4 may be beside int8. None: there are none."""
    unpacks: bool = False
    """The plugin unpacks matrices in 8 and 4 bits to f32. So wide ones are multiplied in parts (`integer_products`),
    and those in 4 bits have their zero points in a product of their own (`quantization.with_zeros_apart`)."""
    is_exported: bool = False
    """As `ModelFacts` has it."""
    large_steps: Dtype | None = None
    """Steps of many tokens are computed in this type, with activations in it.

    On a CPU with AMX, OpenVINO's kernels for int8 take f32 alone and leave AMX unused. A step of 4 tokens takes half as
    long with them as in bf16, one of 32 nine tenths; a prompt takes 1.4 times as long. So the model is compiled for
    both, over one KV cache. That takes twice the memory for weights: the kernels of each pack them in their own way.
    """
    reason: str = ""
    """Why `dtype` is what it is."""

    def for_large_steps(self) -> Numerics:
        assert self.large_steps is not None
        return replace(self, dtype=self.large_steps, activations=self.large_steps, large_steps=None)

    @property
    def rounds(self) -> bool:
        return self.activations == "int8"

    @property
    def words(self) -> str:
        """All that decides which tokens come out, beside the weights."""
        parts: list[str] = [self.dtype]
        if self.integers:
            parts.append(f"activations {'mixed' if self.large_steps else self.activations}")
        if self.kv is not None:
            parts.append(f"kv {self.kv.name}")
        return ", ".join(parts)


def cpu_facts(cpu: Cpu) -> CpuFacts:
    """What a CPU should be able to do, by its instructions.

    OpenVINO lists bf16 for every CPU with AVX-512 and for some with AVX2. Without instructions for it, products take 9
    to 38 times as long as in f32, and attention (2026.4) raises an error. Kernels for int8 that take bf16 need VNNI,
    and give way to those of AMX, which unpack the weights instead.
    """
    if cpu.machine.lower() not in _X86:
        return _arm_facts(cpu)
    dtypes: tuple[Dtype, ...] = ("bf16", "f32") if cpu.flags & _BF16 else ("f32",)
    if cpu.flags & _F16:
        dtypes = (*dtypes, "f16")
    rounds: frozenset[Dtype] = frozenset({"f32"} if _AMX in cpu.flags else dtypes)
    return CpuFacts(dtypes, rounds)


def _arm_facts(cpu: Cpu) -> CpuFacts:
    """OpenVINO 2026.4 was tried on emulated CPUs: without SVE it has no paged attention, it rounds no activations, and
    it offers no bf16. A system that does not list instructions is left to the trials."""
    return CpuFacts(
        dtypes=("f32", "f16") if "asimdhp" in cpu.flags else ("f32",),
        rounds=frozenset(),
        failures={"bf16": "OpenVINO does not offer it on Arm"},
        kv_types=KV_ON_ARM,
        has_attention="sve" in cpu.flags or not cpu.flags,
        unpacks_i4=False,  # not tried: there are kernels for them that round activations
    )


def resolve(cpu: CpuFacts, wish: Wish, model: ModelFacts) -> Numerics:
    """Raises InvalidRequestError for settings that do not go with each other, UnsupportedError for those that do not go
    with the CPU or the model."""
    if model.head_size and not cpu.has_attention:
        raise UnsupportedError("OpenVINO runs language models on Arm only where the CPU has SVE; use --engine torch")
    wish = replace(wish, weights=_weights(wish, model.stored))
    integers = _integers(wish.weights, model.stored)
    if wish.activations == "mixed" and model.is_draft:
        wish = replace(wish, activations="int8")
    if wish.activations == "mixed" and model.head_size:
        return _mixed(cpu, wish, model)
    dtype, reason = _dtype(cpu, wish, model)
    is_lowered = wish.dtype == "auto" and dtype == "f32" and (model.is_capped or cpu.dtypes[0] != "f32")
    halves = is_lowered and wish.kv_cache_dtype == "auto" and "f16" in cpu.kv_types[dtype]
    kv_cache_dtype = "f16" if halves else wish.kv_cache_dtype
    activations = _activations(cpu, wish, dtype, integers is not None)
    return Numerics(
        dtype=dtype,
        activations=activations,
        kv=kv_cache_type(kv_cache_dtype, dtype, model.head_size, cpu.kv_types) if model.head_size else None,
        weights=wish.weights,
        integers=integers,
        unpacks=cpu.unpacks(integers, activations) and not model.is_exported,
        is_exported=model.is_exported,
        reason=reason,
    )


def _weights(wish: Wish, stored: StoredTypes) -> WeightsType:
    if wish.weights != "auto" or stored.block_bits is None:
        return wish.weights
    return "int4" if stored.block_bits < _LEAST_BITS_FOR_INT8 else "int8"


def _integers(weights: WeightsType, stored: StoredTypes) -> IntegersType | None:
    if weights == "auto":
        return stored.integers
    return weights if weights == "int8" or weights == "int4" else None


def _all_integers(weights: WeightsType, stored: StoredTypes) -> bool:
    """All matrices of the decoder are integers: those of a quantized checkpoint may be beside floats."""
    return weights in QUANTIZED and not stored.has_mxfp4


def _dtype(cpu: CpuFacts, wish: Wish, model: ModelFacts) -> tuple[Dtype, str]:
    """And why."""
    if model.is_capped:
        _check_capped(wish)
    if wish.dtype != "auto":
        if wish.dtype not in cpu.dtypes:
            why = cpu.failures.get(wish.dtype, _NO_INSTRUCTIONS)
            raise UnsupportedError(
                f"dtype={wish.dtype} is not offered by this CPU: {why}; it has {', '.join(sorted(cpu.dtypes))}",
                param="dtype",
            )
        return wish.dtype, f"dtype={wish.dtype}"
    if not model.head_size:
        # bf16 is twice as fast, but vectors differ by more than a thousandth: it has to be set.
        return "f32", "an encoder's vectors need f32"
    if model.is_capped:
        return "f32", "attention with capped scores needs f32"
    best = cpu.dtypes[0]
    all_integers = _all_integers(wish.weights, model.stored)
    prefers_int8 = wish.activations == "auto" and all_integers and "f32" in cpu.rounds
    if best != "f32" and best not in cpu.rounds and (prefers_int8 or wish.activations == "int8"):
        # With AMX a step of 4 requests takes half as long as in bf16, one of 16 two thirds, one of 64 as long; prompts
        # take 1.4 times as long. Keys and values are f16 then: as many bytes as bf16.
        return "f32", f"activations in int8 need f32 on this CPU, which computes in {best}, too"
    if best == "f32":
        return best, f"not bf16: {cpu.failures.get('bf16', _NO_INSTRUCTIONS)}"
    return best, f"this CPU has instructions for {best}"


def _check_capped(wish: Wish) -> None:
    for name, value, refused in (
        ("dtype", wish.dtype, ("bf16", "f16")),
        ("kv_cache_dtype", wish.kv_cache_dtype, QUANTIZED_KV),
    ):
        if value in refused:
            raise UnsupportedError(
                f"{name}={value} cannot be combined with capped scores of attention, which this model has; use auto",
                param=name,
            )


def _mixed(cpu: CpuFacts, wish: Wish, model: ModelFacts) -> Numerics:
    """Keys and values are in 8 bits, unless 4 are set: attention in f32 and in bf16 have no other type in common."""
    if model.is_exported:
        raise UnsupportedError(
            "activations=mixed is not for models that OpenVINO's tools exported", param="activations"
        )
    if not _all_integers(wish.weights, model.stored):
        raise InvalidRequestError(
            "activations=mixed needs weights=int8 or weights=int4, and no experts in MXFP4", param="activations"
        )
    if wish.dtype != "auto":
        raise InvalidRequestError("activations=mixed cannot be combined with a dtype", param="activations")
    if model.is_capped:
        raise UnsupportedError(
            "activations=mixed cannot be combined with capped scores of attention, which this model has; use auto",
            param="activations",
        )
    kv_type = "u8" if wish.kv_cache_dtype == "auto" else wish.kv_cache_dtype
    if kv_type not in QUANTIZED_KV:
        raise InvalidRequestError(
            f"kv_cache_dtype={kv_type} cannot be combined with activations=mixed; {', '.join(QUANTIZED_KV)} can",
            param="kv_cache_dtype",
        )
    if "bf16" not in cpu.dtypes or "bf16" in cpu.rounds or "f32" not in cpu.rounds:
        raise UnsupportedError(
            "activations=mixed is not offered by this CPU: it is for those with AMX; use auto", param="activations"
        )
    kv = kv_cache_type(kv_type, "f32", model.head_size)
    reason = "activations=mixed: small steps in f32 with int8, large ones in bf16"
    integers = _integers(wish.weights, model.stored)
    return Numerics("f32", "int8", kv, wish.weights, integers, large_steps="bf16", reason=reason)


def _activations(cpu: CpuFacts, wish: Wish, dtype: Dtype, integers: bool) -> str:
    """What is multiplied by the weights: int8, or the type of the computation.

    With weights in 8 or 4 bits, activations in int8 halve the time of a step: unpacking the weights to floats instead
    takes longer than reading twice as many bytes of bf16.
    """
    allowed = ("int8", dtype) if integers else (dtype,)
    if wish.activations == "auto":
        return "int8" if integers and dtype in cpu.rounds else dtype
    if wish.activations not in allowed:
        raise InvalidRequestError(
            f"activations={wish.activations} cannot be combined with weights={wish.weights} and dtype={dtype}; "
            f"{' and '.join(allowed)} can",
            param="activations",
        )
    if wish.activations == "int8" and dtype not in cpu.rounds:
        other = "int8 with dtype=f32, or " if "f32" in cpu.rounds else ""
        raise UnsupportedError(
            f"activations=int8 is not offered by this CPU with dtype={dtype}; {other}{dtype} is",
            param="activations",
        )
    return wish.activations
