"""The driver of streams on any transport: from a source that calls or is iterated to a writer that may be slow."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

_T = TypeVar("_T")


class StreamDriver(ABC, Generic[_T]):
    """An asynchronous iterator over what needs its task: a client that is slow, the last frames, a response that is not
    written at once. All else that the source brings is written without resuming the task for each piece. Until the task
    comes for more, nothing is taken from the source: it merges there, or waits."""

    _turn: asyncio.Future[_T]
    """Done with what the task is woken for."""

    def __aiter__(self) -> StreamDriver[_T]:
        return self

    async def __anext__(self) -> _T:
        """Raises what the source does."""
        self._turn = asyncio.get_running_loop().create_future()
        try:
            self._listen()
            while not self._turn.done():
                await self._pull()
            return self._turn.result()
        finally:
            self._leave()

    @abstractmethod
    def _listen(self) -> None:
        """From now on the source calls."""

    async def _pull(self) -> None:
        """Waits while the source calls; or takes one piece from a source that can only be iterated."""
        await self._turn

    @abstractmethod
    def _leave(self) -> None:
        """It calls no more. Idempotent."""

    def _wake(self, item: _T) -> None:
        self._leave()
        if not self._turn.done():
            self._turn.set_result(item)

    def _raise(self, error: Exception) -> None:
        """In the task."""
        self._leave()
        if not self._turn.done():
            self._turn.set_exception(error)
