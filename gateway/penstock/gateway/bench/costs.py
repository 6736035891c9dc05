"""What steps read and compute: sums over a model's own count."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engines.contract.model_info import ModelWork
from penstock.kvcache import KVGroup


def decode_bytes(work: ModelWork, groups: Sequence[KVGroup], batch: int, context: float) -> float:
    """Read by a step in which each of `batch` requests gets a token: the weights once, and what each of these tokens
    attends to, of `context` tokens with itself."""
    keys_and_values = sum(size * _attended(group, context) for size, group in zip(work.kv_bytes, groups, strict=True))
    return work.weight_bytes + batch * keys_and_values


def decode_flops(work: ModelWork, groups: Sequence[KVGroup], batch: int, context: float) -> float:
    """Of the same step."""
    attention = sum(
        flops * _attended(group, context) for flops, group in zip(work.attention_flops, groups, strict=True)
    )
    return batch * (work.token_flops + work.logits_flops + attention)


def prompt_flops(work: ModelWork, groups: Sequence[KVGroup], length: int) -> float:
    """Of a whole prompt, and the logits of its last token. A token attends to those before it and to itself."""
    attention = sum(
        flops * sum(_attended(group, position + 1) for position in range(length))
        for flops, group in zip(work.attention_flops, groups, strict=True)
    )
    return length * work.token_flops + work.logits_flops + attention


def threads_for(work: ModelWork, num_tokens: int) -> int:
    """Of a step of so many tokens."""
    return next(threads for least, threads in reversed(work.threads) if num_tokens >= least)


def _attended(group: KVGroup, context: float) -> float:
    return min(context, group.window) if group.window else context
