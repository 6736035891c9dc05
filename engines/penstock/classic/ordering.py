"""`preserve_ordering`: responses leave in the order in which their requests were executed."""

from __future__ import annotations

from collections import deque

from penstock.classic.call import Call
from penstock.classic.messages import InferResponse


class ResponseOrder:
    """Holds the responses of a request back until all requests before it have had their last one."""

    def __init__(self) -> None:
        self._line: deque[Call] = deque()
        self._held: dict[Call, list[InferResponse]] = {}

    def enter(self, call: Call) -> None:
        """It is executed now, perhaps not for the first time."""
        if call in self._held:
            return
        self._line.append(call)
        self._held[call] = []

    def deliver(self, call: Call, response: InferResponse) -> None:
        held = self._held.get(call)
        if held is None:
            return
        held.append(response)
        self._release()

    def leave(self, call: Call) -> None:
        """It ends without a response through here."""
        if self._held.pop(call, None) is not None:
            self._release()

    def _release(self) -> None:
        line = self._line
        while line:
            call = line[0]
            held = self._held.get(call)
            if held is not None:
                for response in held:
                    call.deliver(response)
                if not (held and held[-1].final):
                    held.clear()
                    return
                del self._held[call]
            line.popleft()
