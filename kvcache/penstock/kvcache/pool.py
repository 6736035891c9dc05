"""The pool of KV cache blocks: reference counts, free blocks, and the cached blocks among them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from penstock.kvcache.integrity import require
from penstock.kvcache.retention import Mark, Marks, Retention

BlockHash = bytes


class BlockPool:
    """Blocks 0..num_blocks-1, each in exactly one of three places.

    - referenced: `ref_count > 0`, named by that many block tables
    - blank: free, holds nothing worth keeping
    - evictable: free, but its contents are in the prefix cache; least recently used first, and those that are marked
      after all others

    Every operation is O(1) per block, but for a tenant's first marks (`Marks`). Blank blocks are handed out before
    cached ones are evicted.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._ref_counts = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._marked: OrderedDict[int, None] = OrderedDict()
        """The evictable blocks with a mark; `_evictable` has those without."""
        self._marks = Marks(num_blocks // 2)
        self._by_hash: dict[BlockHash, int] = {}
        self.evicted: list[tuple[int, BlockHash]] | None = None
        """Cached blocks that were handed out since the list was last emptied, in order; None: nobody asks. Their
        contents stay until the next step writes."""
        self.on_eviction: Callable[[BlockHash], None] | None = None
        """Called for each block that leaves the prefix cache when it is handed out."""

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, evictable ones included."""
        return len(self._blank) + len(self._evictable) + len(self._marked)

    @property
    def num_marked(self) -> int:
        """Blocks with a mark, referenced or not: at most half of all."""
        return len(self._marks.by_block)

    @property
    def num_cached(self) -> int:
        """Blocks in the prefix cache, referenced or not."""
        return len(self._by_hash)

    @property
    def num_evictable(self) -> int:
        """Free blocks whose contents are in the prefix cache."""
        return len(self._evictable) + len(self._marked)

    @property
    def num_shared(self) -> int:
        """Blocks with more than one reference. Looks at all of them."""
        counts = self._ref_counts
        return len(counts) - counts.count(0) - counts.count(1)

    def is_cached(self, block_id: int) -> bool:
        return self._hashes[block_id] is not None

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def is_writable(self, block_id: int) -> bool:
        """A block may be written by its only holder, and only while nobody can find it in the prefix cache."""
        return self._ref_counts[block_id] == 1 and self._hashes[block_id] is None

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. Raises ValueError when there are not so many; see `num_free`."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        blank = self._blank
        from_blank = min(count, len(blank))
        split = len(blank) - from_blank
        blocks = blank[split:]
        del blank[split:]
        for _ in range(count - from_blank):
            blocks.append(self._evict())
        ref_counts = self._ref_counts
        for block_id in blocks:
            ref_counts[block_id] = 1
        return blocks

    def retain(self, block_ids: Sequence[int]) -> None:
        """One more reference to each; an evictable block is in use again."""
        ref_counts, marks = self._ref_counts, self._marks.by_block
        for block_id in block_ids:
            if not ref_counts[block_id]:
                del (self._marked if block_id in marks else self._evictable)[block_id]
            ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One reference less to each. Of the blocks freed here, the first in order are evicted first."""
        ref_counts, marks = self._ref_counts, self._marks.by_block
        for block_id in block_ids:
            count = ref_counts[block_id] - 1
            if count < 0:
                raise ValueError(f"block {block_id} released once too often")
            ref_counts[block_id] = count
            if not count:
                if self._hashes[block_id] is None:
                    self._blank.append(block_id)
                else:
                    (self._marked if block_id in marks else self._evictable)[block_id] = None

    def lookup(self, block_hash: BlockHash) -> int | None:
        """The block that holds these contents. Retain it before the next allocation."""
        return self._by_hash.get(block_hash)

    def publish(self, block_id: int, block_hash: BlockHash) -> bool:
        """Puts a full, computed block into the prefix cache; from now on it is immutable.

        False, and nothing is done, when these contents are cached already: the first block of equal ones stays.
        """
        if block_hash in self._by_hash:
            return False
        self._by_hash[block_hash] = block_id
        self._hashes[block_id] = block_hash
        return True

    def mark(self, block_hashes: Sequence[BlockHash], retention: Retention, now: float) -> None:
        """Those of a prompt's blocks that are cached, from its beginning, are evicted after unmarked ones until the
        time is over. As many as may be marked at all; where a mark has to give way, the prompt's end goes first. `now`:
        in seconds, never less than before."""
        known = [self._by_hash[block_hash] for block_hash in block_hashes if block_hash in self._by_hash]
        mark = Mark(now + retention.seconds, retention)
        for block_id in reversed(known[: self._marks.limit]):
            displaced = self._marks.add(block_id, mark)
            if displaced is not None and displaced in self._marked:
                del self._marked[displaced]
                self._evictable[displaced] = None
            if not self._ref_counts[block_id]:
                self._evictable.pop(block_id, None)
                self._marked[block_id] = None
                self._marked.move_to_end(block_id)

    def expire(self, now: float) -> None:
        """Ends marks. Blocks whose time is over are the next to be evicted: nobody has asked for more since."""
        if not self._marks.by_block:
            return
        for block_id in reversed(self._marks.expire(now)):
            if block_id in self._marked:
                del self._marked[block_id]
                self._evictable[block_id] = None
                self._evictable.move_to_end(block_id, last=False)

    def evict_next(self, block_ids: Iterable[int]) -> None:
        """Those that are evictable and have no mark are evicted before all others."""
        for block_id in block_ids:
            if block_id in self._evictable:
                self._evictable.move_to_end(block_id, last=False)

    def cached_blocks(self) -> list[tuple[int, BlockHash]]:
        """All blocks of the prefix cache: those in use, then the others, those that would be evicted last first."""
        order = [*reversed(self._marked), *reversed(self._evictable)]
        free = [(block_id, self._hashes[block_id]) for block_id in order]
        in_use = [(block_id, known) for known, block_id in self._by_hash.items() if self._ref_counts[block_id]]
        return in_use + [(block_id, known) for block_id, known in free if known is not None]

    def clear_cache(self) -> None:
        """Empties the prefix cache. Blocks in use stay with their holders."""
        for block_id in self._by_hash.values():
            self._hashes[block_id] = None
        self._by_hash.clear()
        for queue in (self._evictable, self._marked):
            self._blank.extend(queue)
            queue.clear()
        self._marks.clear()

    def _evict(self) -> int:
        if self._evictable:
            block_id, _ = self._evictable.popitem(last=False)
        else:
            block_id, _ = self._marked.popitem(last=False)
            self._marks.remove(block_id)
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block_id] = None
            if self.evicted is not None:
                self.evicted.append((block_id, block_hash))
            if self.on_eviction is not None:
                self.on_eviction(block_hash)
        self.num_evictions += 1
        return block_id

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every block is in exactly one place and the prefix cache names real contents."""
        blank, evictable = set(self._blank), set(self._evictable) | set(self._marked)
        referenced = {b for b, count in enumerate(self._ref_counts) if count > 0}
        require(len(blank) == len(self._blank), "a block is blank twice")
        require(not blank & evictable and not (blank | evictable) & referenced, "a block is in two places")
        require(len(blank) + len(evictable) + len(referenced) == self.num_blocks, "a block is lost")
        require(all(self._hashes[b] is None for b in blank), "a blank block has a hash")
        require(all(self._hashes[b] is not None for b in evictable), "an evictable block has no hash")
        by_block = {b: h for b, h in enumerate(self._hashes) if h is not None}
        self._marks.check_integrity()
        require(all(b in self._marks.by_block for b in self._marked), "a block without a mark is evicted late")
        require(not any(b in self._marks.by_block for b in self._evictable), "a marked block is evicted early")
        require(all(b in by_block for b in self._marks.by_block), "a block that is not cached has a mark")
        require(by_block == {b: h for h, b in self._by_hash.items()}, "index and block hashes differ")
