"""Events about prefix caches: ours as vLLM's own classes read them, and vLLM's as we do."""

from __future__ import annotations

import msgspec
import pytest

from penstock.engines.kv_events.index import CacheIndex, PromptHashes, read_batch
from penstock.engines.kv_events.messages import encoded, events_of, public_hash
from penstock.kvcache import BlockHasher, BlocksRemoved, BlocksStored, CacheCleared, KVGroup

vllm = pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed: .ci/vllm runs this")

FIRST, SECOND = bytes(range(16)), bytes(range(16, 32))


def test_vllm_reads_our_events() -> None:
    entries = [
        CacheCleared(),
        BlocksStored(0, [FIRST, SECOND], None, [1, 2, 3, 4], 2, "team/tuned:3"),
        BlocksStored(1, [SECOND], FIRST, [3, 4], 2, ""),
        BlocksRemoved(1, [SECOND]),
    ]
    batch = msgspec.msgpack.decode(
        encoded(events_of(entries, (KVGroup(2), KVGroup(2, 8))), 7.5), type=vllm.KVEventBatch
    )
    first, second = public_hash(FIRST), public_hash(SECOND)
    assert (batch.ts, batch.data_parallel_rank) == (7.5, 0)
    cleared, stored, windowed, removed = batch.events
    assert isinstance(cleared, vllm.AllBlocksCleared)
    assert isinstance(stored, vllm.BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash, stored.token_ids) == ([first, second], None, [1, 2, 3, 4])
    assert (stored.block_size, stored.lora_name, stored.medium) == (2, "team/tuned", "GPU")
    assert (stored.group_idx, stored.kv_cache_spec_kind) == (0, "full_attention")
    assert isinstance(windowed, vllm.BlockStored)
    assert (windowed.parent_block_hash, windowed.lora_name) == (first, None)
    assert (windowed.kv_cache_spec_kind, windowed.kv_cache_spec_sliding_window) == ("sliding_window", 8)
    assert isinstance(removed, vllm.BlockRemoved)
    assert (removed.block_hashes, removed.medium, removed.group_idx) == ([second], "GPU", 1)


def test_we_read_vllm_s_events() -> None:
    hasher = BlockHasher()
    index, prompt = CacheIndex(hasher, "m"), PromptHashes(hasher, [1, 2, 3, 4, 5])
    block = vllm.BlockStored(
        block_hashes=[b"1" * 32, b"2" * 32],
        parent_block_hash=None,
        token_ids=[1, 2, 3, 4],
        block_size=2,
        lora_id=None,
        medium="GPU",
        lora_name=None,
    )
    removed = vllm.BlockRemoved(block_hashes=[b"2" * 32], medium="GPU")
    for event, tokens in ((block, 4), (removed, 2), (vllm.AllBlocksCleared(), 0)):
        index.apply(read_batch(msgspec.msgpack.encode(vllm.KVEventBatch(ts=1.0, events=[event]))).events)
        assert index.matched(prompt) == tokens
