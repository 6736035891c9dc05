"""Types of the KV cache: which go with a computation and a head size, and what the plugin is told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.engines.openvino.config import KVCacheType

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
        found: dict[str, Any] = {"KEY_CACHE_PRECISION": self.key, "VALUE_CACHE_PRECISION": self.value}
        if self.key == "u4":
            found["KEY_CACHE_GROUP_SIZE"] = self.group  # where the plugin has no scales for each channel: not on x86
        if self.value == "u4":
            found["VALUE_CACHE_GROUP_SIZE"] = self.group
        return found


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
            f"kv_cache_dtype={name} does not go with dtype={precision}; {', '.join(allowed)} do", param="kv_cache_dtype"
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
