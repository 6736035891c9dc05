"""How layers are dealt out to groups, and how many blocks a cache gets."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from penstock.engines.errors import ContextLengthError, UnsupportedError
from penstock.engines.kit.cache_size import StateSpace, group_layers, max_model_len, num_blocks
from penstock.kvcache import KVGroup, StateGroup


@dataclass
class Settings:
    num_blocks: int | None = None
    kv_cache_memory: int | str | None = None
    max_num_seqs: int = 2
    max_num_batched_tokens: int = 32


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([0, 0, 0], [(0, (0, 1, 2))]),
        ([8, 0, 8, 0], [(8, (0, 2)), (0, (1, 3))]),
        ([8, 8, 0] * 2, [(8, (0, 3)), (8, (1, 4)), (0, (2, 5))]),
        ([*[8] * 5, 0], [*[(8, (layer,)) for layer in range(5)], (0, (5,))]),
        ([*[8] * 5, *[0] * 4], [(8, (0, 2, 4)), (8, (1, 3)), (0, (5, 6, 7, 8))]),
        ([*[8] * 6, *[0] * 5], [(8, (0, 1, 2, 3, 4, 5)), (0, (6, 7, 8, 9, 10))]),
    ],
)
def test_groups_are_about_equally_large(windows: list[int], expected: list[tuple[int, tuple[int, ...]]]) -> None:
    assert [group[:2] for group in group_layers(windows)] == expected


def test_layers_with_smaller_keys_share_a_slot() -> None:
    groups = group_layers([8, 8, 8, 0] * 2, [16, 16, 16, 32] * 2)
    assert groups == [(8, (0, 2, 5), 2), (8, (1, 4, 6), 2), (0, (3, 7), 1)]
    assert [groups[0].in_slot(slot) for slot in range(2)] == [(0, 2), (5,)]
    assert [groups[0].place(layer) for layer in (0, 2, 5)] == [0, 1, 0]
    assert [group.num_slots for group in groups] == [2, 2, 2]
    assert [group.per_slot for group in group_layers([8, 0], [24, 16])] == [1, 1]


@pytest.mark.parametrize(
    ("settings", "free", "expected"),
    [
        (Settings(num_blocks=3), 0, 3),
        (Settings(kv_cache_memory=1009), 0, 10),
        (Settings(), 100 * 2 * 9, 9),
        (Settings(), 10**9, 2 * (7 + 4)),
    ],
)
def test_the_cache_is_as_large_as_asked_for_or_as_can_be_used(settings: Settings, free: int, expected: int) -> None:
    """Of 100 tokens a request keeps all in the first group, and in the second 15 behind the 32 of a step."""
    groups = (KVGroup(16), KVGroup(16, 16))
    assert num_blocks(settings, groups, 100, 100, free=free, share=0.5) == expected


@pytest.mark.parametrize(("groups", "least"), [((KVGroup(16),), "one block"), ((KVGroup(16),) * 3, "3 blocks")])
def test_each_group_needs_a_block(groups: tuple[KVGroup, ...], least: str) -> None:
    enough = Settings(kv_cache_memory=100 * len(groups))
    assert num_blocks(enough, groups, 100, 100, free=0, share=0.5) == len(groups)
    short = Settings(kv_cache_memory=100 * len(groups) - 1)
    with pytest.raises(UnsupportedError, match=f"does not hold {least} of 100 bytes"):
        num_blocks(short, groups, 100, 100, free=0, share=0.5)


def test_a_context_is_as_long_as_asked_for_or_as_the_model_allows() -> None:
    assert (max_model_len(None, 512), max_model_len(512, 512), max_model_len(9, None)) == (512, 512, 9)
    with pytest.raises(ContextLengthError, match="513 is above the model's 512"):
        max_model_len(513, 512)
    with pytest.raises(UnsupportedError, match="max_model_len must be set"):
        max_model_len(None, None)


def test_states_get_rows_for_seats_steps_and_checkpoints() -> None:
    space = StateSpace.of(Settings(), 16, 10, free=10**6)
    assert space.working_bytes == 120 + 160
    assert space.bytes_beside(8) == 5
    assert space.group(20, 8) == StateGroup(16, 12 + 10, 8)
    assert StateSpace.of(Settings(), 0, 0, free=10**6).group(20, 8) is None


@pytest.mark.parametrize(("free", "rows", "guesses"), [(720, 12, 6), (440, 11, 4), (0, 10, 4)])
def test_seats_without_memory_for_states_wait_for_rows(free: int, rows: int, guesses: int) -> None:
    """There are always enough for one request in two steps, and for some guesses."""
    space = StateSpace.of(Settings(), 16, 10, free=free)
    assert (space.working_rows, space.guess_rows) == (rows, guesses)
    assert StateGroup(16, rows, 8).largest_chunk(32, 2) == 32


def test_states_are_part_of_the_memory_of_the_cache() -> None:
    """Of the memory that is asked for, or of the share of what is free."""
    settings = Settings(kv_cache_memory=2000)
    space = StateSpace.of(settings, 16, 10, free=10**9)
    assert space == StateSpace.of(Settings(), 16, 10, free=2000)
    count = num_blocks(settings, [KVGroup(16)], 100, 100, free=10**9, share=0.5, beside=space.working_bytes)
    assert count == (2000 - space.working_bytes) // 100
    assert num_blocks(Settings(), [KVGroup(16)], 10**6, 100, free=4000, share=0.5, beside=1000) == 15
    with pytest.raises(UnsupportedError, match="one block of 100 bytes and 1950 bytes of recurrent states"):
        num_blocks(settings, [KVGroup(16)], 100, 100, free=0, share=0.5, beside=1950)
