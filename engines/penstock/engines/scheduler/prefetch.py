"""Blocks from outside of the KV cache that requests wait for: of the tier behind it, or of another engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.engines.contract.engine_view import WaitsFor
from penstock.engines.scheduler.pending import Pending
from penstock.engines.scheduler.request import Request
from penstock.kvcache import BlockHash, KVCacheManager

_LONGEST = 5.0
"""Seconds. After that a prompt is computed again rather than waited for any longer."""


@dataclass(eq=False, slots=True)
class Prefetch:
    """Blocks that are read for one request, which waits for them (`Pending`)."""

    reason: ClassVar[str] = WaitsFor.BLOCKS_OUTSIDE
    request: Request
    blocks: list[tuple[BlockHash, int]]
    """(hash, slot)"""
    begun: float
    give_up_at: float
    contents: dict[BlockHash, Any] | None = None
    """By hash, what could be read of them; None: they are still being read."""
    is_live: bool = True
    """The request has not run since."""
    error: None = None

    @property
    def is_pending(self) -> bool:
        return self.contents is None


@dataclass(frozen=True, slots=True)
class _Twin:
    """The request ahead that reads the same blocks: until it computes them, or has not got them (`Pending`)."""

    reason: ClassVar[str] = WaitsFor.BLOCKS_OUTSIDE
    prefetch: Prefetch
    error: None = None

    @property
    def is_pending(self) -> bool:
        return self.prefetch.is_live


class Prefetches:
    """At most one of each waiting request. Times are passed in. The reader empties `begun`, and calls `ended`.

    They are `Pending` themselves: while any are being read, there is no room for one that is larger.
    """

    reason: ClassVar[str] = WaitsFor.BLOCKS_OUTSIDE
    error: None = None

    def __init__(self, kv: KVCacheManager) -> None:
        self.begun: list[Prefetch] = []
        """Those that are to be read now."""
        self.num_waits = 0
        """Requests that have waited for their blocks since the start."""
        self.wait_seconds = 0.0
        """How long, together."""
        self.num_loaded = 0
        """Blocks that were read and came into the KV cache."""
        self.num_missed_tokens = 0
        """In full blocks of prompts that another engine had computed, and that were found nowhere. Behind the last
        checkpoint of recurrent states there is nothing to be found."""
        self._kv = kv
        self._num_blocks = 0
        """That are read and not in the KV cache yet, of all requests together."""
        self._num_reading = 0
        """Requests whose blocks are being read."""
        self._live: dict[int, Prefetch] = {}
        """By the id of a request that has not run since."""
        self._by_hash: dict[BlockHash, Prefetch] = {}
        """Those in `_live` by what they read."""

    @property
    def is_pending(self) -> bool:
        return self._num_reading > 0

    def of(self, request: Request, now: float) -> Pending | None:
        """What the next request, whose chains are known, has to wait for. None: nothing, whether its blocks are here or
        there are none."""
        source = self._kv.source
        if source is None or request.id in self._live or request.chains is None or request.scores_prompt:
            return None
        missing = self._kv.missing(request.token_ids, request.chains, source.max_reading)
        other = self._by_hash.get(missing[0][0]) if missing else None
        if other is not None and other.request.key < request.key:
            return _Twin(other)
        room = source.max_reading - self._num_blocks
        if len(missing) > room:
            if self._num_reading:
                return self
            missing = self._kv.missing(request.token_ids, request.chains, room)
        if not missing:
            return None
        prefetch = Prefetch(request, missing, now, now + _LONGEST)
        self._live[request.id] = prefetch
        self._num_blocks += len(missing)
        self._num_reading += 1
        self._by_hash.update((block_hash, prefetch) for block_hash, _ in missing)
        self.begun.append(prefetch)
        self.num_waits += 1
        return prefetch

    def fetched(self, request: Request) -> dict[BlockHash, Any]:
        """What has been read for a request."""
        prefetch = self._live.get(request.id)
        return prefetch.contents or {} if prefetch is not None else {}

    def admitted(self, request: Request, num_cached: int, num_loaded: int) -> None:
        """The request runs, with so many leading tokens that need not be computed, and so many blocks of what was
        read."""
        self.drop(request)
        self.num_loaded += num_loaded
        if request.num_preemptions == 0 and request.num_tokens > request.num_prompt_tokens:
            size = self._kv.groups[0].block_size
            known = self._kv.kept_of(request.num_prompt_tokens) // size * size
            self.num_missed_tokens += max(0, known - num_cached)

    def ended(self, prefetch: Prefetch, contents: dict[BlockHash, Any], now: float) -> None:
        """It has been read; ignored for one that was given up."""
        if prefetch.contents is None:
            self._end(prefetch, contents)
            self.wait_seconds += now - prefetch.begun

    def _end(self, prefetch: Prefetch, contents: dict[BlockHash, Any]) -> None:
        if prefetch.contents is None:
            self._num_reading -= 1
        prefetch.contents = contents

    def give_up(self, now: float) -> bool:
        """Lets requests go on that have waited too long. Whether there was one."""
        late = [prefetch for prefetch in self._live.values() if prefetch.is_pending and prefetch.give_up_at <= now]
        for prefetch in late:
            self.ended(prefetch, {}, now)
        return bool(late)

    @property
    def next_look(self) -> float | None:
        """Latest time of the next `give_up`."""
        return min((one.give_up_at for one in self._live.values() if one.is_pending), default=None)

    def drop(self, request: Request) -> None:
        """The request runs, or has ended."""
        prefetch = self._live.pop(request.id, None)
        if prefetch is None:
            return
        prefetch.is_live = False
        self._end(prefetch, {})
        self._num_blocks -= len(prefetch.blocks)
        for block_hash, _ in prefetch.blocks:
            if self._by_hash.get(block_hash) is prefetch:
                del self._by_hash[block_hash]

    def clear(self) -> None:
        """What has been read counts no more; requests that wait for more go on without."""
        for prefetch in self._live.values():
            self._end(prefetch, {})
