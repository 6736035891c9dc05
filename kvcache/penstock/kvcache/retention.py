"""Marks on cached blocks that should be evicted after all others: until when, and for which tenant."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, TypeVar

from penstock.kvcache.integrity import require

_Name = TypeVar("_Name", int, str)


class Retention(NamedTuple):
    """What a request asks for its prompt's blocks."""

    seconds: int
    tenant: str = ""


class Mark(NamedTuple):
    until: float
    retention: Retention


class Marks:
    """At most `limit` blocks are marked. Every operation is O(1) per block, except that a tenant below its share looks
    at all tenants with marks: that is no more than `limit` for all of its share.

    Beyond the limit a tenant with at least an equal share of the marks (the limit, divided by the tenants that have
    any) gives up its own oldest one for each new one. A tenant with less takes the oldest one of the tenant with most.
    So no tenant falls below an equal share because of others.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.by_block: dict[int, Mark] = {}
        """For others to look at."""
        self._by_seconds: dict[int, OrderedDict[int, None]] = {}
        """Blocks marked for the same time: the first mark ends first, since time only goes on."""
        self._by_tenant: dict[str, OrderedDict[int, None]] = {}
        """Oldest mark first, or the one renewed longest ago."""

    def add(self, block_id: int, mark: Mark) -> int | None:
        """Marks a block, unless it has a mark that ends later. Returns the block that loses its own for this one, if
        any. Of marks for the same number of seconds none ends before an older one; the limit is at least 1."""
        known, displaced = self.by_block.get(block_id), None
        if known is not None:
            if known.until > mark.until:
                self._by_tenant[known.retention.tenant].move_to_end(block_id)
                return None
            self.remove(block_id)
        elif len(self.by_block) >= self.limit:
            displaced = self._oldest_of(self._giver(mark.retention.tenant))
            self.remove(displaced)
        self.by_block[block_id] = mark
        seconds, tenant = mark.retention
        _put(self._by_seconds, seconds, block_id)
        _put(self._by_tenant, tenant, block_id)
        return displaced

    def _giver(self, tenant: str) -> str:
        """Who gives up a mark for one of this tenant."""
        tenants = self._by_tenant
        own = len(tenants.get(tenant, ()))
        if own and own >= self.limit // len(tenants):
            return tenant
        return max(tenants, key=lambda name: len(tenants[name]))

    def _oldest_of(self, tenant: str) -> int:
        return next(iter(self._by_tenant[tenant]))

    def remove(self, block_id: int) -> None:
        _, (seconds, tenant) = self.by_block.pop(block_id)
        _take_out(self._by_seconds, seconds, block_id)
        _take_out(self._by_tenant, tenant, block_id)

    def expire(self, now: float) -> list[int]:
        """Removes the marks that end by `now`. Returns their blocks, of each length of time the oldest first."""
        over = []
        for blocks in self._by_seconds.values():
            for block_id in blocks:
                if self.by_block[block_id].until > now:
                    break
                over.append(block_id)
        for block_id in over:
            self.remove(block_id)
        return over

    def clear(self) -> None:
        self.by_block.clear()
        self._by_seconds.clear()
        self._by_tenant.clear()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless all books name the same marks, each where it belongs."""
        require(len(self.by_block) <= self.limit, "too many blocks are marked")
        by_seconds = {b: seconds for seconds, blocks in self._by_seconds.items() for b in blocks}
        by_tenant = {b: tenant for tenant, blocks in self._by_tenant.items() for b in blocks}
        marks = {block_id: mark.retention for block_id, mark in self.by_block.items()}
        require(marks.keys() == by_seconds.keys() == by_tenant.keys(), "a mark is lost")
        require(all(marks[b] == (by_seconds[b], by_tenant[b]) for b in marks), "a mark is in the wrong place")
        for blocks in self._by_seconds.values():
            ends = [self.by_block[block_id].until for block_id in blocks]
            require(ends == sorted(ends), "a mark ends before an older one")


def _put(books: dict[_Name, OrderedDict[int, None]], name: _Name, block_id: int) -> None:
    blocks = books.get(name)
    if blocks is None:
        blocks = books[name] = OrderedDict()
    blocks[block_id] = None


def _take_out(books: dict[_Name, OrderedDict[int, None]], name: _Name, block_id: int) -> None:
    blocks = books[name]
    del blocks[block_id]
    if not blocks:
        del books[name]
