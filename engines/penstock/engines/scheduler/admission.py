"""Admission of waiting requests: which one is next, what it still waits for, and the seat and the blocks it gets."""

from __future__ import annotations

from penstock.engines.scheduler.intake import QueueIntake
from penstock.engines.scheduler.pending import Pending
from penstock.engines.scheduler.prefetch import Prefetches
from penstock.engines.scheduler.request import Request
from penstock.engines.scheduler.running import RunningRequests, StepUnderWay
from penstock.kvcache import HashChain, KVCacheManager

_MAX_RESERVE_SHIFT = 16
_MOST_LOOKED_AT = 1 << 16
"""Tokens of requests that a step passes by because of their prompts: some milliseconds, in which it hashes these. The
next step looks at the others."""


class Admission:
    """Moves requests from the intake's queue to those that run, as far as there are seats, tokens and blocks."""

    def __init__(
        self,
        intake: QueueIntake,
        running: RunningRequests,
        kv: KVCacheManager,
        prefetches: Prefetches | None,
        chunk: int,
    ) -> None:
        """`prefetches`: None where blocks come from nowhere else; `chunk`: most tokens of one request in a step."""
        self._config = intake.config
        self._intake = intake
        self._running = running
        self._kv = kv
        self._prefetches = prefetches
        self._chunk = chunk
        self._no_room = (0, -1)
        """(id, free blocks) when the head of the queue last found too few blocks."""
        self._watermark = max(1, kv.pool.num_blocks // 100)
        """Blocks that an admission leaves free, so that running requests can grow."""
        self.short_of_blocks = False
        """Whether the last call of `schedule` ended because the next request needs more blocks than are free."""

    def schedule(self, new: StepUnderWay, left: int, now: float) -> int:
        """Admits waiting requests in order; stops at the first that finds no seat or too few blocks. Returns how many
        of the `left` tokens remain. Nothing in the background is admitted beside others."""
        self.short_of_blocks = False
        looked_at = 0
        while left > 0 and self._running.num_free_seats > 0 and looked_at < _MOST_LOOKED_AT:
            request = self._intake.waiting.peek()
            if request is None or (request.background and self._running.has_others):
                break
            blocked, num_free = self._no_room
            if request.id == blocked and self._kv.num_free <= num_free and self._running.runs:
                self.short_of_blocks = True
                break
            pending = request.pending
            if pending is None:
                pending = self._found_pending(request, now)
                looked_at += 0 if pending is None else request.num_tokens
            if pending is not None:
                self._intake.pass_by(request, pending)
                continue
            count = self._admit(request, new, left)
            if not count:
                self._no_room = (request.id, self._kv.num_free)
                self.short_of_blocks = True
                break
            if request.first_scheduled is None:
                request.first_scheduled = now
            left -= count
        return left

    def _found_pending(self, request: Request, now: float) -> Pending | None:
        """What the next request waits for that only a look into the caches tells: its prompt is being computed by
        another one, or its blocks are being read."""
        same_prompt = self._computed_by_another(request)
        if same_prompt is not None or self._prefetches is None:
            return same_prompt
        return self._prefetches.of(request, now)

    def _computed_by_another(self, request: Request) -> Pending | None:
        """The last block of this prompt that a running request ahead of this one computes, if there is one. Who is
        behind may be kept from advancing, by this one too."""
        if request.scores_prompt or not self._config.enable_prefix_caching:
            return None
        return self._kv.computing.find(request.token_ids, self._chains_of(request)[0], request.key)

    def _chains_of(self, request: Request) -> tuple[HashChain, ...]:
        if request.chains is None:
            attachments = () if request.images is None else request.images.attachments
            request.chains = self._kv.chains(adapter=request.adapter, salt=request.cache_salt, attachments=attachments)
        return request.chains

    def _admit(self, request: Request, new: StepUnderWay, limit: int) -> int:
        """Makes the next request run: the number of its tokens in this step, 0 if blocks are short.

        All of its known tokens get their blocks now, so that prompts computed in chunks cannot block each other.
        The blocks that it must leave free double each time that it was preempted because they were short, so that it
        comes back when it can stay.
        """
        shift = min(request.num_shortages, _MAX_RESERVE_SHIFT)
        reserve = min(self._watermark << shift, self._kv.pool.num_blocks) if self._running.runs else 0
        read_cache = not request.scores_prompt and self._config.enable_prefix_caching
        admitted = self._kv.admit(
            request.token_ids,
            self._chains_of(request),
            self._chunk,
            reserve=reserve,
            read_cache=read_cache,
            fetched={} if self._prefetches is None else self._prefetches.fetched(request),
        )
        if admitted is None:
            return 0
        self._intake.pop()
        tables, cached = admitted
        if self._prefetches is not None:
            self._prefetches.admitted(request, cached, len(tables.loads))
        if request.num_preemptions == 0:
            request.num_cached_tokens = cached
            if read_cache:
                self._intake.looked_up(request.num_tokens, cached)
        request.charged_tokens = max(request.charged_tokens, cached)  # hits are free
        self._intake.waiting.charge(request, request.num_prompt_tokens)
        if read_cache:
            self._kv.computing.announce(tables, request.token_ids, request.key)
        run = self._running.start(request, tables, cached)
        count = run.cut(cached, min(request.num_tokens - cached, limit, self._chunk), advances=True)
        new.include(run, count)
        return count
