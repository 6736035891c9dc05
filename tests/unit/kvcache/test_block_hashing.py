from __future__ import annotations

import pytest

from penstock.kvcache import Attachment, BlockHasher, HashChain
from penstock.kvcache.hashing import AttachedChain

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


def hashes(*attachments: Attachment, tokens: int = 32, size: int = 4) -> list[bytes]:
    """Of zeros; `size`: of a block."""
    chain = AttachedChain(HASHER, HASHER.root(), size, attachments)
    chain.extend([0] * tokens, tokens // size)
    return chain.hashes


PLAIN = HashChain(HASHER, HASHER.root(), 4)
PLAIN.extend([0] * 32, 8)


def shared(*one: Attachment, other: tuple[Attachment, ...] = ()) -> int:
    """Leading blocks that have the same hashes; `other` (): nothing is attached there."""
    pairs = zip(hashes(*one), hashes(*other) if other else PLAIN.hashes, strict=True)
    return next((number for number, (first, second) in enumerate(pairs) if first != second), 8)


@pytest.mark.parametrize(("start", "equal"), [(0, 0), (3, 0), (4, 1), (9, 2), (31, 7)])
def test_what_is_attached_counts_from_its_first_block_on(start: int, equal: int) -> None:
    image = Attachment(start, 1, b"a")
    assert shared(image) == shared(image, other=(Attachment(start, 1, b"b"),)) == equal
    assert shared(image, other=(image,)) == 8


def test_where_and_which_part_of_it_stands_counts() -> None:
    image = Attachment(5, 20, b"a")
    for other in (image._replace(start=6), image._replace(length=19), image._replace(offset=1)):
        assert shared(image, other=(other,)) < 8
    assert shared(image, other=(Attachment(5, 3, b"a"), Attachment(8, 17, b"a", 3))) == 8, "cut at a block's border"
    assert shared(image, other=(image._replace(start=6),)) == 1
    assert shared(Attachment(4, 2, b"a"), Attachment(6, 1, b"b"), other=(Attachment(4, 2, b"ab"),)) == 1


def test_a_branch_goes_on_as_its_chain() -> None:
    image = Attachment(5, 20, b"a")
    chain = AttachedChain(HASHER, HASHER.root(), 4, [image])
    chain.extend([0] * 32, 3)
    branch = chain.branch(9)
    assert branch.hashes == chain.hashes[:2]
    branch.extend([0] * 32, 8)
    assert branch.hashes == hashes(image)


def test_an_index_of_hashes_learns_which_blocks_have_more_than_tokens() -> None:
    chain = AttachedChain(HASHER, HASHER.root(), 4, [Attachment(5, 4, b"\1"), Attachment(9, 1, b"\2")])
    assert chain.extra_keys(0, 4) == [None, ["01"], ["01", "02"], None]
    assert chain.extra_keys(3, 4) is None
    assert PLAIN.extra_keys(0, 8) is None
