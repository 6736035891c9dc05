"""An answer as it comes, for programs without an event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from penstock.gateway.llm.dataplane import ChoiceDelta, Generation
from penstock.gateway.offline.loop_thread import LoopThread


class AnswerStream(Iterator[ChoiceDelta]):
    """Closing it, or giving it up, aborts what still runs. A reader that is slow gets more text at once."""

    def __init__(self, owner: object, thread: LoopThread, generation: Generation) -> None:
        """`owner` is not given up before the stream is."""
        self._owner = owner
        self._thread = thread
        self._generation = generation
        self._ready: deque[ChoiceDelta] = deque()

    def __next__(self) -> ChoiceDelta:
        """Raises the PenstockError that ended a choice, if one did."""
        while not self._ready:
            deltas = self._thread.run(self._more())
            if deltas is None:
                raise StopIteration
            self._ready += deltas
        return self._ready.popleft()

    async def _more(self) -> list[ChoiceDelta] | None:
        return await anext(self._generation, None)

    def close(self) -> None:
        self._ready.clear()
        self._thread.soon(self._generation.close)

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
