"""The books of evicted blocks that are kept elsewhere."""

from __future__ import annotations

import pytest

from penstock.kvcache import BlockTier


def tier(num_slots: int = 3, max_writing: int = 2) -> BlockTier:
    made = BlockTier(num_slots, max_writing, max_reading=1)
    made.open()
    return made


def keep(books: BlockTier, name: bytes) -> int:
    slot = books.reserve(name)
    assert slot is not None
    books.written(name, slot, succeeded=True)
    books.check_integrity()
    return slot


def test_the_one_used_longest_ago_is_overwritten() -> None:
    books = tier()
    slots = {name: keep(books, name) for name in (b"a", b"b", b"c")}
    assert books.use(b"a") == slots[b"a"]
    assert keep(books, b"d") == slots[b"b"]
    assert b"b" not in books
    assert books.reserve(b"c") is None, "evicted again: it is there, and counts as used"
    assert keep(books, b"e") == slots[b"a"]
    assert b"c" in books


def test_a_block_can_be_found_once_it_is_written() -> None:
    books = tier()
    slot = books.reserve(b"a")
    assert b"a" not in books
    assert books.reserve(b"a") is None
    assert slot is not None
    books.written(b"a", slot, succeeded=True)
    assert books.use(b"a") == slot
    assert (books.num_saved, books.num_dropped) == (1, 0)


def test_what_is_behind_or_fails_is_dropped() -> None:
    books = tier()
    slots = [books.reserve(name) for name in (b"a", b"b", b"c")]
    assert slots[2] is None
    assert slots[0] is not None
    books.written(b"a", slots[0], succeeded=False)
    books.check_integrity()
    assert (books.num_kept, books.num_saved, books.num_dropped) == (0, 0, 2)
    assert books.reserve(b"c") == slots[0]


def test_nothing_is_taken_in_while_all_slots_are_being_written() -> None:
    books = tier(num_slots=1)
    assert books.reserve(b"a") == 0
    assert books.reserve(b"b") is None
    books.check_integrity()


def test_an_opened_store_is_known() -> None:
    """The newest of two with the same hash counts, and the holes are used first."""
    books = BlockTier(5, 1, 1)
    assert books.reserve(b"x") is None, "not before it is open"
    books.open([(b"a", 3), (b"b", 1), (b"a", 0)])
    books.check_integrity()
    assert (books.use(b"a"), books.num_kept) == (0, 2)
    assert [keep(books, name) for name in (b"c", b"d", b"e", b"f")] == [2, 3, 4, 1]
    with pytest.raises(ValueError, match="slot 5 of 5"):
        books.open([(b"a", 5)])


def test_a_damaged_block_is_forgotten_once() -> None:
    books = tier()
    slot = keep(books, b"a")
    assert books.forget(b"a", slot)
    assert not books.forget(b"a", slot)
    books.check_integrity()
    assert keep(books, b"b") == slot
    assert not books.forget(b"b", slot + 1)


def test_what_was_being_written_when_it_was_cleared_is_not_kept() -> None:
    books = tier()
    slot = books.reserve(b"a")
    assert slot is not None
    books.clear()
    books.written(b"a", slot, succeeded=True)
    books.check_integrity()
    assert books.num_kept == 0
