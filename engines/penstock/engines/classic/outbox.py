"""From the threads that make responses to the event loop."""

from __future__ import annotations

import contextlib
import threading
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable

from penstock.engines.classic.call import Call
from penstock.engines.classic.messages import InferResponse


class Outbox:
    """Responses from any thread, in order, to one receiver on the loop. Those that come close together share a
    wake-up; those of the loop's own thread need none."""

    def __init__(self, loop: AbstractEventLoop, receive: Callable[[Call, InferResponse], None]) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._receive = receive
        self._posted: deque[tuple[Call, InferResponse]] = deque()
        self._awake = False

    def post(self, call: Call, response: InferResponse) -> None:
        self._posted.append((call, response))
        if threading.get_ident() == self._thread:
            self.flush()
        elif not self._awake:
            self._awake = True
            # After the loop has been closed there is nobody left to tell.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.flush)

    def flush(self) -> None:
        """On the loop: hands over what has been posted."""
        # First the flag: what is posted from now on either is seen below or wakes the loop again.
        self._awake = False
        posted = self._posted
        while posted:
            call, response = posted.popleft()
            self._receive(call, response)
