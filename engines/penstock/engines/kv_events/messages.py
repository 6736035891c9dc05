"""Events as vLLM writes them since its version 0.24: MessagePack, a batch as an array, an event as a map.

Source: vllm/distributed/kv_events.py. Fields that only vLLM has are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.kvcache import BlockHash, BlocksRemoved, BlocksStored, CacheEntry, KVGroup

_MEDIUM = "GPU"
"""vLLM's word for the memory that the model computes from, wherever that is."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None
    group_idx: int
    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None = None
    extra_keys: list[list[str] | None] | None = None
    """Of each block, the keys of the images whose embeddings it holds."""


class BlockRemoved(msgspec.Struct, tag=True, kw_only=True):
    block_hashes: list[int]
    medium: str
    group_idx: int


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    """Unix seconds."""
    events: list[Event]
    data_parallel_rank: int = 0


_encode = msgspec.msgpack.Encoder().encode


def encoded(events: list[Event], now: float, rank: int = 0) -> bytes:
    """A batch. `now`: Unix seconds."""
    return _encode(EventBatch(now, events, rank))


def public_hash(block_hash: BlockHash) -> int:
    """The last 8 bytes, as routers expect numbers. 64 bits of a keyed hash tell the blocks of a cache apart."""
    return int.from_bytes(block_hash[-8:], "big")


def events_of(entries: Sequence[CacheEntry], groups: Sequence[KVGroup]) -> list[Event]:
    return [_event(entry, groups) for entry in entries]


def _event(entry: CacheEntry, groups: Sequence[KVGroup]) -> Event:
    if isinstance(entry, BlocksStored):
        window = groups[entry.group].window
        return BlockStored(
            block_hashes=[public_hash(block_hash) for block_hash in entry.hashes],
            parent_block_hash=None if entry.parent is None else public_hash(entry.parent),
            token_ids=entry.token_ids,
            block_size=entry.block_size,
            lora_id=None,
            medium=_MEDIUM,
            lora_name=_adapter_name(entry.adapter),
            group_idx=entry.group,
            kv_cache_spec_kind="sliding_window" if window else "full_attention",
            kv_cache_spec_sliding_window=window or None,
            extra_keys=entry.extra_keys,
        )
    if isinstance(entry, BlocksRemoved):
        hashes = [public_hash(block_hash) for block_hash in entry.hashes]
        return BlockRemoved(block_hashes=hashes, medium=_MEDIUM, group_idx=entry.group)
    return AllBlocksCleared()


def _adapter_name(key: str) -> str | None:
    """The gateway's keys are NAME:NUMBER, and requests name the NAME."""
    return key.rpartition(":")[0] or key or None
