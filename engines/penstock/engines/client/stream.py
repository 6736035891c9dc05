"""The merging mailbox between an engine and one client call.

The engine puts deltas in, once per step; the client takes out everything that has come since it last looked. A slow
reader finds several tokens merged into one delta: memory stays bounded by what it asked for, the engine never waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.messages import FinishReason, RequestError, RequestOutput


class RequestStream:
    """Outputs of one client call: an asynchronous iterator of lists of RequestOutput, at most one for each live id.
    A list is empty only after `nudge`.

    Every id gets exactly one output with a finish reason; after the last of them the iteration ends. Closing the stream
    early (`close`, or leaving an `async with`) aborts what is still running.
    """

    def __init__(self, ids: Iterable[int], abort: Callable[[Sequence[int]], None]) -> None:
        self._live = set(ids)
        self._abort = abort
        self.arrival_number = 0
        """How many samples the engine had been sent in all, these included. Once its `EngineStats.own_admitted` is as
        high, it has taken these in, and the errors of those that it refused have arrived here."""
        self._pending: dict[int, RequestOutput] = {}
        self._waiter: asyncio.Future[bool] | None = None
        self._listener: Callable[[], None] | None = None
        self._listener_is_due = False
        """A call of the listener is scheduled, or is the caller's task (`add`)."""

    def is_taken_in(self, stats: EngineStats) -> bool:
        """Whether the engine has taken in all that it was sent of this call. `stats`: its newest."""
        return stats.own_admitted >= self.arrival_number

    @property
    def live_ids(self) -> frozenset[int]:
        """Ids without a terminal output so far."""
        return frozenset(self._live)

    def put(self, output: RequestOutput) -> None:
        """Merges an output into the mailbox. Outputs of ids that have ended are dropped."""
        if self.add(output):
            asyncio.get_running_loop().call_soon(self.call_listener)

    def add(self, output: RequestOutput) -> bool:
        """As `put`, for an engine's step, which has outputs for many streams. True: call `call_listener` when all of
        the step has been added."""
        request_id = output.id
        if request_id not in self._live:
            return False
        earlier = self._pending.get(request_id)
        if earlier is None:
            self._pending[request_id] = output
        else:
            _merge(earlier, output)
        if output.finish_reason is not None:
            self._live.discard(request_id)
        if self._listener is not None:
            first = not self._listener_is_due
            self._listener_is_due = True
            return first
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(False)
        return False

    def listen(self, listener: Callable[[], None] | None) -> None:
        """An alternative to iterating: `listener` is called on the event loop whenever there is something to `take`,
        once for all that a step has brought, and after `nudge`. It must not raise. None ends that."""
        self._listener = listener
        if listener is not None and self._pending:
            self._call_soon()

    def _call_soon(self) -> None:
        if not self._listener_is_due:
            self._listener_is_due = True
            asyncio.get_running_loop().call_soon(self.call_listener)

    def call_listener(self) -> None:
        self._listener_is_due = False
        if self._listener is not None:
            self._listener()

    def nudge(self) -> None:
        """A reader that waits now gets an empty list."""
        if self._listener is not None:
            self._call_soon()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def fail(self, error: RequestError) -> None:
        """Ends every live id with this error."""
        for request_id in tuple(self._live):
            self.put(RequestOutput(request_id, [], FinishReason.ERROR, error=error))

    def end(self, request_id: int, reason: FinishReason) -> None:
        """Ends one id; nothing that arrives for it later is delivered."""
        self.put(RequestOutput(request_id, [], reason))

    def take(self) -> list[RequestOutput]:
        """What has come since the last call; may be empty."""
        outputs = list(self._pending.values())
        self._pending.clear()
        return outputs

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[RequestOutput]:
        while not self._pending:
            if not self._live:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                if await self._waiter:
                    break
            finally:
                self._waiter = None
        return self.take()

    def close(self) -> None:
        """Aborts what is still running."""
        if self._live:
            self._abort(tuple(self._live))
            self._live.clear()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


def _merge(earlier: RequestOutput, later: RequestOutput) -> None:
    earlier.token_ids.extend(later.token_ids)
    earlier.finish_reason = later.finish_reason
    earlier.stop_token_id = later.stop_token_id
    earlier.error = later.error
    earlier.prompt = earlier.prompt or later.prompt
    earlier.guessed = later.guessed or earlier.guessed
    if later.logprobs is not None:
        earlier.logprobs = (earlier.logprobs or []) + later.logprobs
