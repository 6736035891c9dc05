"""Which layers share a block table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class LayerGroup(NamedTuple):
    """Layers with the same window, which share a block table (`ModelInfo.kv_groups`)."""

    window: int
    layers: tuple[int, ...]
    """The n-th of them lives in slot n of the cache: memory that all groups share, since a block belongs to one group
    at a time."""


def group_layers(windows: Sequence[int]) -> list[LayerGroup]:
    """Deals the layers out to groups of about equal size, so that a block is as large in all of them; `windows` as in
    `KVGroup.window`, for each layer. One kind of layer is one group. (The rule of vLLM's hybrid KV cache manager.)"""
    kinds: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    # Where the kinds have about as many layers, a few empty slots cost less than more groups.
    size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    groups = []
    for window, layers in kinds.items():
        parts = -(-len(layers) // size)
        groups += [LayerGroup(window, tuple(layers[part::parts])) for part in range(parts)]
    return groups
