"""What a server has cached, by its events alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.engines.kv_events.index import BadEvents, CacheIndex, Event, PromptHashes, Removed, Stored, read_batch
from penstock.kvcache import BlockHasher

HASHER = BlockHasher()
SIZE = 4
PROMPT = list(range(100, 114))
"""Three blocks and a half."""


def index(**settings: Any) -> CacheIndex:
    return CacheIndex(HASHER, "tuned", **settings)


def stored(names: list[Any], tokens: list[int], parent: Any = None, **fields: Any) -> Stored:
    return Stored(names, parent, tokens, SIZE, **fields)


def matched(known: CacheIndex, tokens: list[int] = PROMPT) -> int:
    return known.matched(PromptHashes(HASHER, tokens))


def test_prompts_are_matched_by_tokens_up_to_what_was_evicted() -> None:
    known = index()
    assert matched(known) == 0
    known.apply([stored([7, 8], PROMPT[:8]), stored([9], PROMPT[8:12], 8), stored([5], [1, 2, 3, 4])])
    assert (matched(known), matched(known, PROMPT[:7]), matched(known, [1, 2, 3, 4, 100])) == (12, 4, 4)
    known.apply([Removed([8])])
    assert (matched(known), len(known)) == (4, 3)
    known.apply([stored([8], PROMPT[4:8], 7)])
    assert matched(known) == 12
    known.apply(read_batch(msgspec.msgpack.encode([1, [["AllBlocksCleared"]]])).events)
    assert (matched(known), len(known)) == (0, 0)


ROW = ["BlockStored", [3], 2, [5, 6], 2, None]
"""As vLLM 0.9 wrote it; later versions have more fields behind these."""
LATER = {"lora_name": None, "medium": "GPU", "extra_keys": None, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
MAP = {"type": "BlockStored", "block_hashes": [3], "parent_block_hash": 2, "token_ids": [5, 6], "block_size": 2}


@pytest.mark.parametrize(
    "batch",
    [
        [1.5, [ROW]],
        [1.5, [[*ROW, "GPU"]], 3],
        [1.5, [[*ROW, "GPU", None, [None], 0, "full_attention", None, "of a version to come"]], 0],
        [1.5, [MAP | LATER | {"lora_id": None}], 0],
        {"ts": 1.5, "events": [MAP | LATER | {"lora_id": None, "of a version": "to come"}], "data_parallel_rank": 0},
    ],
    ids=["rows", "rows with a medium", "long rows", "maps", "all maps"],
)
def test_all_forms_that_vllm_has_had_are_read(batch: Any) -> None:
    seconds, [event] = read_batch(msgspec.msgpack.encode(batch))
    assert isinstance(event, Stored)
    assert (seconds, event.block_hashes, event.parent_block_hash) == (1.5, [3], 2)
    assert (event.token_ids, event.block_size) == ([5, 6], 2)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93",
        b"\xdc\xff\xff",
        msgspec.msgpack.encode({"ts": "now", "events": []}),
        msgspec.msgpack.encode([1, [["BlockMoved"]]]),
        msgspec.msgpack.encode([1, [[*ROW[:3], ["x"], 2, None]]]),
        msgspec.msgpack.encode([1, [[*ROW[:4], "2", None]]]),
        msgspec.msgpack.encode([1, [7]]),
    ],
)
def test_what_is_no_batch_is_an_error(data: bytes) -> None:
    with pytest.raises(BadEvents):
        read_batch(data)


@pytest.mark.parametrize(
    "event",
    [
        Stored([1], None, [], 0),
        Stored([1], None, [1], 1 << 40),
        Stored([1], None, [-1], 1),
        Stored([b"x" * 65], None, [1], 1),
    ],
)
def test_what_no_cache_can_say_is_an_error(event: Event) -> None:
    with pytest.raises(BadEvents):
        index().apply([event])


@pytest.mark.parametrize(
    "event",
    [
        stored([1, 2], PROMPT[:4]),
        stored([2], PROMPT[4:8], 1),
        stored([1], PROMPT[:4], medium="CPU"),
        stored([1], PROMPT[:4], lora_id=3),
        stored([1], PROMPT[:4], lora_name="another"),
        stored([1], PROMPT[:4], extra_keys=[["an image"]]),
        stored([1], PROMPT[:4], extra_keys=["salt"]),
    ],
    ids=["fewer tokens", "no parent", "slower memory", "a number", "an adapter", "an image", "a salt"],
)
def test_blocks_that_no_prompt_can_hit_are_left_out(event: Stored) -> None:
    known = index()
    known.apply([event])
    assert (matched(known), len(known)) == (0, 0)


def test_an_adapter_s_blocks_are_its_own() -> None:
    known = index()
    known.apply([stored([1], PROMPT[:4])])
    assert matched(known) == 4, "as far as is known, the name is the model's"
    known.apply([stored([2], PROMPT[:4], lora_name="tuned", extra_keys=[["tuned"]]), stored([3], PROMPT[4:8], 1)])
    assert (matched(known), len(known)) == (4, 1)


def test_one_group_of_layers_counts_and_a_whole_one_first() -> None:
    window, whole = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}, {"group_idx": 1}
    known = index()
    known.apply([stored([1], PROMPT[:4], **window)])
    assert matched(known) == 4
    known.apply([stored([1, 2], PROMPT[:8], **whole), stored([5], PROMPT[8:12], 2, **window)])
    assert matched(known) == 8
    known.apply([Removed([1], group_idx=0)])
    assert matched(known) == 8
    known.apply([Removed([1], group_idx=1)])
    assert matched(known) == 0


def test_equal_blocks_of_two_salts_are_cached_until_both_are_gone() -> None:
    known = index()
    known.apply([stored([1], PROMPT[:4]), stored([2], PROMPT[:4]), Removed([1, 1, 99])])
    assert matched(known) == 4
    known.apply([stored([2], PROMPT[:4]), stored([9], [9, 9, 9, 9]), Removed([2])])
    assert (matched(known), len(known)) == (0, 1), "however often it was told"


def test_its_memory_is_bounded() -> None:
    known = index(capacity=2)
    known.apply([stored([1, 2, 3], PROMPT[:12]), stored([4], [9, 9, 9, 9])])
    assert (matched(known), len(known)) == (8, 2)
    known.apply([Removed([1, 2]), stored([4], [9, 9, 9, 9])])
    assert matched(known, [9, 9, 9, 9]) == 4
    assert len(known._counts) == 1
