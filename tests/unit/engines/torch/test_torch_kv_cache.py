"""The memory of the torch runner's KV cache."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from penstock.engines.host.memory import resident_memory
from penstock.engines.torch.attention import LayerLayout, TorchKVCache

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_blocks_take_memory_when_they_are_written() -> None:
    layer = nn.Identity()
    layout = LayerLayout(kv_heads=2, key_size=64, value_size=64, dtype=torch.bfloat16)
    before = resident_memory().anonymous
    cache = TorchKVCache({layer: layout}, 16384, 32, torch.device("cpu"))
    _, keys, values = cache.slots(layer)
    assert keys.shape == values.shape == (16384 * 32, 2, 64)
    assert resident_memory().anonymous - before < 16 * MIB  # of 256 MiB
    keys[-32:] = 3.0
    cache.copy_blocks([(16383, 5)])
    assert keys[5 * 32 : 6 * 32].eq(3).all()
    assert not keys[: 5 * 32].any()
    assert not values[-64:].any()
    assert resident_memory().anonymous - before < 32 * MIB
    del cache, keys, values
    assert resident_memory().anonymous - before < 8 * MIB
