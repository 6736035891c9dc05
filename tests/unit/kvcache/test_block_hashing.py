from __future__ import annotations

import pytest

from penstock.kvcache import BlockHasher

HASHER = BlockHasher(b"key")


def test_equal_tokens_behind_equal_parents_have_equal_hashes() -> None:
    assert HASHER.block(HASHER.root(), [1, 2]) == HASHER.block(HASHER.root(), [1, 2])


def test_a_hash_stands_for_everything_before_it() -> None:
    one, other = HASHER.block(HASHER.root(), [1, 2]), HASHER.block(HASHER.root(), [2, 1])
    assert HASHER.block(one, [3, 4]) != HASHER.block(other, [3, 4])


@pytest.mark.parametrize(
    "keys",
    [
        {"salt": "a"},
        {"adapter": "a"},
        {"salt": "a", "adapter": "a"},
        {"salt": "aa"},
        {"adapter": "aa"},
        {"salt": "\x00"},
        {"salt": "\ud800"},
    ],
)
def test_every_set_of_keys_has_a_root_of_its_own(keys: dict[str, str]) -> None:
    assert HASHER.root(**keys) != HASHER.root()
    assert HASHER.root(**keys) == HASHER.root(**keys)
    swapped = {"salt": keys.get("adapter", ""), "adapter": keys.get("salt", "")}
    assert (HASHER.root(**swapped) == HASHER.root(**keys)) == (swapped == {"salt": "", "adapter": "", **keys})


def test_an_adapter_means_the_same_only_where_that_is_said() -> None:
    assert BlockHasher(b"key").root(adapter="a") != HASHER.root(adapter="a")
    told = [BlockHasher(b"key", adapters_of=of).root(adapter="a") for of in (b"x", b"x", b"y")]
    assert told[0] == told[1] != told[2]


def test_the_border_between_two_keys_counts() -> None:
    assert HASHER.root(adapter="ab", salt="c") != HASHER.root(adapter="a", salt="bc")


def test_large_token_ids_do_not_collide_with_small_ones() -> None:
    root = HASHER.root()
    assert len({HASHER.block(root, [token]) for token in (0, 1, 2**16, 2**31, 2**32, 2**32 + 1)}) == 6


def test_each_process_has_a_key_of_its_own() -> None:
    assert BlockHasher().root() != BlockHasher().root()
