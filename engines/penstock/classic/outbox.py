"""From the threads that make responses to the event loop."""

from __future__ import annotations

import asyncio
import threading
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from penstock.classic.call import Call
from penstock.classic.messages import InferResponse

MAX_POSTED = 1024
"""Responses on their way to the loop, beyond which a sending thread waits."""

MAX_WAIT = 1.0
"""Seconds that it waits at most: a loop that does not turn must not hold a model's thread for ever."""

READER_WAIT = 60.0
"""Seconds that it waits at most for a reader, after which it looks again when it has sent more."""


class Outbox:
    """Responses from any thread, in order, to one receiver on the loop. Those that come close together share a
    wake-up; those of the loop's own thread need none."""

    def __init__(self, loop: AbstractEventLoop, receive: Callable[[Call, InferResponse], None]) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._receive = receive
        self._posted: deque[tuple[Call, InferResponse]] = deque()
        self._awake = False
        self._flushed = threading.Event()

    def post(self, call: Call, response: InferResponse) -> None:
        self._posted.append((call, response))
        if threading.get_ident() == self._thread:
            self.flush()
            return
        if not self._awake:
            self._awake = True
            try:
                self._loop.call_soon_threadsafe(self.flush)
            except RuntimeError:
                return  # the loop has been closed: there is nobody left to tell
        if len(self._posted) > MAX_POSTED:
            self._wait_for_loop()
        if call.is_ahead(response):
            self._wait_for_reader(call)

    def _wait_for_reader(self, call: Call) -> None:
        with suppress(RuntimeError, TimeoutError):  # the loop may end
            asyncio.run_coroutine_threadsafe(call.has_room(), self._loop).result(READER_WAIT)

    def _wait_for_loop(self) -> None:
        """A thread that sends faster than the loop can take waits for the loop; for a reader it waits only where that
        paces it."""
        self._flushed.clear()
        # It may have been flushed before the flag was cleared. After it, the flush that is on its way sets the flag.
        if len(self._posted) > MAX_POSTED:
            self._flushed.wait(MAX_WAIT)

    def flush(self) -> None:
        """On the loop: hands over what has been posted until now."""
        # First the flag: what is posted from now on either is seen below or wakes the loop again.
        self._awake = False
        posted = self._posted
        # No more than was there, or a thread that posts without a pause would never let the readers have their turn.
        for _ in range(len(posted)):
            if not posted:
                break
            call, response = posted.popleft()
            self._receive(call, response)
        if not self._flushed.is_set():
            self._flushed.set()
