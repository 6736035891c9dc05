"""Paged attention of a step: its tokens as tensors, which of them attend together, and how.

Requests with one token each (decodes) attend together if their contexts are about equally long, everything else by
itself. Tokens are put in that order, so that what attends together is one slice.

transformers' models call one function, and who answers is written on the modules themselves: a module is looked up and
not a global, so that several models can live in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from penstock.engines.kit.batch import Int32s, Ints, StepBatch
from penstock.engines.kit.cache_size import LayerGroup, group_layers
from penstock.engines.torch.config import fresh_tensor
from penstock.engines.torch.recurrent import StatePiece, plan_pieces


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
                    keys = fresh_tensor((*shape, layout.key_size), layout.dtype, device)
                    values = fresh_tensor((*shape, layout.value_size), layout.dtype, device)
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


_MOST_SCORES = 1 << 22
"""Pairs of a query and a key, over all requests of a slice: bounds the mask and, times the heads, the scores."""
_MOST_KEYS = 1 << 16
"""Keys gathered for a slice of decodes."""
_SLACK = 64
"""A slice's longest context has at most twice the keys of its shortest, plus these."""


@dataclass(slots=True)
class Reach:
    """The positions that `queries` [requests, count] may attend to: `num_keys` from each request's `first` on."""

    queries: Tensor
    first: Tensor
    """[requests]"""
    num_keys: int
    window: int
    """0: all before a token, and the token itself."""
    whole: bool
    """One request whose keys are just these tokens."""
    _mask: Tensor | None = field(default=None, init=False)

    def slots(self, tables: Int32s, block_size: int) -> Tensor:
        """[requests, num_keys]: where the keys lie. A shorter context's row ends with its own last slot over and over:
        what is masked is multiplied by zero, so it must not be another's NaN."""
        keys = self.first[:, None] + torch.arange(self.num_keys, device=self.first.device)
        at = torch.minimum(keys, self.queries[:, -1:])
        blocks = torch.from_numpy(tables.astype(np.int64)).to(self.first.device)
        return blocks.gather(1, at // block_size) * block_size + at % block_size

    @property
    def plainly_causal(self) -> bool:
        """The mask is a triangle."""
        return self.whole and not self._binding

    @property
    def mask(self) -> Tensor | None:
        """bool [requests, 1, count, num_keys]: causal and within the window. None: everything is seen."""
        if self.queries.numel() == 1:
            return None
        if self._mask is None:
            keys = (self.first[:, None] + torch.arange(self.num_keys, device=self.first.device))[:, None, None]
            queries = self.queries[:, None, :, None]
            self._mask = keys <= queries
            if self._binding:
                self._mask &= keys > queries - self.window
        return self._mask

    @property
    def _binding(self) -> bool:
        return 0 < self.window < self.num_keys


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [start, stop) of a step: `num_requests` requests with equally many of them each."""

    start: int
    stop: int
    num_requests: int
    views: list[tuple[Reach, Tensor]]
    """For each of the cache's views: what is attended to, and in which slots it lies [requests, num_keys]."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """T tokens in the order of the slices."""

    token_ids: Tensor
    """[T]"""
    positions: Tensor
    """[T]"""
    slot_mappings: Tensor
    """[views, T]: where a token's keys and values are written."""
    slices: list[Slice]
    owners: Ints
    """[T]: the request of each token, by its index in the batch."""
    places: Ints
    """[T]: where each of the batch's tokens is in this order."""
    pieces: Sequence[StatePiece]
    """For recurrent layers; empty: there are none."""


def make_step(
    batch: StepBatch, views: Sequence[View], block_size: int, device: torch.device, *, has_states: bool = False
) -> StepTensors:
    """`views` of the cache, whose blocks have `block_size` tokens; `has_states`: of recurrent
    layers."""
    plan = list(_plan(batch.computed, batch.scheduled))
    owners = np.concatenate([np.repeat(requests, count) for requests, _, count in plan])
    positions = np.concatenate([(first[:, None] + np.arange(count)).ravel() for _, first, count in plan])
    sources = batch.begins[owners] + positions - batch.computed[owners]
    places = np.empty_like(sources)
    places[sources] = np.arange(len(sources))
    tables = [batch.groups[view.group].block_ids for view in views]
    blocks, offsets = np.divmod(positions, block_size)
    slots = [table[owners, blocks] * np.int64(block_size) + offsets for table in tables]
    packed = torch.from_numpy(np.stack([batch.token_ids[sources], positions, *slots])).to(device)
    slices, start = [], 0
    for requests, first, count in plan:
        stop = start + len(requests) * count
        queries = packed[1, start:stop].view(-1, count)
        reaches = {window: _reach(queries, first, window) for window in {view.window for view in views}}
        reach_by_view = [
            (reaches[view.window], reaches[view.window].slots(table[requests], block_size))
            for view, table in zip(views, tables, strict=True)
        ]
        slices.append(Slice(start, stop, len(requests), reach_by_view))
        start = stop
    pieces = list(plan_pieces(batch, places, block_size, device)) if has_states else ()
    return StepTensors(packed[0], packed[1], packed[2:], slices, owners, places, pieces)


def _reach(queries: Tensor, first: Ints, window: int) -> Reach:
    """`first` [requests]: the position of each one's first query."""
    begin = np.maximum(first - window + 1, 0) if window else np.zeros_like(first)
    num_keys = int((first - begin).max()) + queries.shape[1]
    whole = len(first) == 1 and first[0] == 0
    return Reach(queries, torch.from_numpy(begin).to(queries.device), num_keys, window, whole)


def _plan(computed: Ints, scheduled: Ints) -> Iterator[tuple[Ints, Ints, int]]:
    """(requests, the position of each one's first token, how many of each) for each slice."""
    decodes = np.flatnonzero(scheduled == 1)
    decodes = decodes[np.argsort(computed[decodes], kind="stable")]
    for start, stop in _cuts((computed[decodes] + 1).tolist()):
        together = decodes[start:stop]
        yield together, computed[together], 1
    for i in np.flatnonzero(scheduled > 1).tolist():
        first, end = int(computed[i]), int(computed[i] + scheduled[i])
        while first < end:
            count = min(end - first, max(1, _MOST_SCORES // end))
            yield np.array([i]), np.array([first]), count
            first += count


def _cuts(contexts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of these ascending lengths that attend together."""
    start = 0
    for i, context in enumerate(contexts):
        too_long = context > 2 * contexts[start] + _SLACK
        if i > start and (too_long or (i + 1 - start) * context > _MOST_KEYS):
            yield start, i
            start = i
    if contexts:
        yield start, len(contexts)


ATTENTION = "penstock_paged"
"""Its name in transformers. It has no mask function there: such attention is given no mask and makes its own."""

_HANDLER = "penstock_attention"


class AttentionHandler(Protocol):
    """Answers the attention calls of a model's layers."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """query [1, heads, T, head_size], key and value [1, kv_heads, T, size]; gives [1, T, heads, value_size].

        `options`: what else the model passes, by transformers' names.
        """
        ...


def register() -> None:
    AttentionInterface.register(ATTENTION, _dispatch)


def attach(model: nn.Module, handler: AttentionHandler) -> None:
    """From now on `handler` answers for all of the model's layers."""
    for module in model.modules():
        setattr(module, _HANDLER, handler)


def _dispatch(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    handler: AttentionHandler = getattr(module, _HANDLER)
    return handler.attend(module, query, key, value, attention_mask, options), None


class PagedAttention:
    """Answers the layers' calls during one forward pass at a time; `step` is set before it."""

    step: StepTensors

    def __init__(self, cache: TorchKVCache) -> None:
        self.cache = cache

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Writes the tokens' keys and values, then attends slice by slice (`AttentionHandler.attend`)."""
        view, keys, values = self.cache.slots(module)
        keys.index_copy_(0, self.step.slot_mappings[view], key[0].transpose(0, 1).to(keys.dtype))
        values.index_copy_(0, self.step.slot_mappings[view], value[0].transpose(0, 1).to(values.dtype))
        outputs = []
        for part in self.step.slices:
            reach, slots = part.views[view]
            # [heads, requests * count, size] -> [requests, heads, count, size]
            q = query[0, :, part.start : part.stop].reshape(len(query[0]), part.num_requests, -1, query.shape[-1])
            q = q.transpose(0, 1)
            k, v = keys[slots].transpose(1, 2), values[slots].transpose(1, 2)
            outputs.append(_attend(reach, q, k, v, options).transpose(1, 2).flatten(0, 1))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]


def _attend(reach: Reach, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """q [N, heads, count, size], k and v [N, kv_heads, K, size]; gives [N, heads, count, value_size]."""
    scaling, softcap, sinks = options.get("scaling"), options.get("softcap"), options.get("s_aux")
    scaling = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if softcap is not None or sinks is not None:
        return _attend_plainly(q, k, v, reach.mask, scaling, softcap, sinks)
    heads, count = q.shape[1:3]
    if reach.plainly_causal:
        grouped = heads != k.shape[1]
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
    if count == 1:
        # Heads that share a key become its queries: nothing is repeated.
        packed = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
        return scaled_dot_product_attention(packed, k, v, reach.mask, scale=scaling).reshape(len(q), heads, 1, -1)
    return scaled_dot_product_attention(q, k, v, reach.mask, scale=scaling, enable_gqa=heads != k.shape[1])


def _attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """With scores capped at +-softcap, or with sinks [heads]: the scores of a token that is not there."""
    requests, heads, count, _ = q.shape
    kv_heads = k.shape[1]
    scores = (q.reshape(requests, kv_heads, -1, q.shape[-1]) @ k.mT).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(requests, heads, count, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(requests, -1, count, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]].to(v.dtype)
    return (weights.view(requests, kv_heads, -1, k.shape[2]) @ v).view(requests, heads, count, -1)
