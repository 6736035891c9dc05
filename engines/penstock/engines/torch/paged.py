"""Attention of a step's tokens over the paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from penstock.engines.torch.kv_cache import TorchKVCache
from penstock.engines.torch.step import Reach, Step


class PagedAttention:
    """Answers the layers' calls during one forward pass at a time; `step` is set before it."""

    step: Step

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
