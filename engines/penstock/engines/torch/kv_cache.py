"""The KV cache's tensors: keys and values of all blocks for each layer."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.engines.kit.cache_size import LayerGroup, group_layers


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """What one layer keeps of a token."""

    kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    window: int = 0
    """How many tokens a token attends to, itself included; 0: all before it."""

    @property
    def token_bytes(self) -> int:
        return self.kv_heads * (self.key_size + self.value_size) * self.dtype.itemsize


class View(NamedTuple):
    """What a layer sees of a request's past: the blocks of a group of layers, within a window as in `LayerLayout`."""

    group: int
    window: int


def groups_of(layouts: Sequence[LayerLayout]) -> list[LayerGroup]:
    """Layers that keep as much of a token are grouped by their windows, and the groups share memory. If they do not,
    all are one group without a window: nothing behind it is freed."""
    alike = len({replace(layout, window=0) for layout in layouts}) == 1
    return group_layers([layout.window if alike else 0 for layout in layouts])


def bytes_of_block(layouts: Sequence[LayerLayout], block_size: int) -> int:
    """Of a block in all layers of the largest group."""
    return block_size * max(sum(layouts[n].token_bytes for n in group.layers) for group in groups_of(layouts))


class TorchKVCache:
    """Block b of a layer is keys[b] and values[b], `[block_size, kv_heads, size]` each.

    The n-th layers of all groups have the same tensors: a block belongs to one group at a time.
    """

    def __init__(
        self, layouts: Mapping[nn.Module, LayerLayout], num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.views: list[View] = []
        self._layers: dict[nn.Module, tuple[int, Tensor, Tensor]] = {}
        self._tensors: list[tuple[Tensor, Tensor]] = []
        modules = list(layouts)
        for number, group in enumerate(groups_of(list(layouts.values()))):
            for place, layer in enumerate(group.layers):
                layout = layouts[modules[layer]]
                if place == len(self._tensors):
                    shape = (num_blocks, block_size, layout.kv_heads)
                    keys = _zeros((*shape, layout.key_size), layout.dtype, device)
                    values = _zeros((*shape, layout.value_size), layout.dtype, device)
                    self._tensors.append((keys, values))
                view = View(number, layout.window)
                if view not in self.views:
                    self.views.append(view)
                self._layers[modules[layer]] = (self.views.index(view), *self._tensors[place])

    def slots(self, module: nn.Module) -> tuple[int, Tensor, Tensor]:
        """A layer's view, as an index, and its keys and values by slot: [num_blocks * block_size, kv_heads, size],
        views of the blocks."""
        view, keys, values = self._layers[module]
        return view, keys.flatten(0, 1), values.flatten(0, 1)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """(source, destination) one after the other, in every layer."""
        for source, destination in copies:
            for keys, values in self._tensors:
                keys[destination] = keys[source]
                values[destination] = values[source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU the memory becomes resident when it is written first, in huge pages where there are some: torch.zeros
    writes to all of it, half of the machine's memory for a cache that may never be full."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    count = math.prod(shape)
    fresh = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            fresh.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(fresh, dtype=dtype, count=count).view(shape)
