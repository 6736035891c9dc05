"""A driver of streams whose source can call its reader: that saves the resumption of a task for each item."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Listener(Protocol[T_contra]):
    """Called on the event loop."""

    def take(self, item: T_contra, /) -> None: ...

    def fail(self, error: Exception, /) -> None:
        """The last call: what the iterator would have raised."""


class PushingSource(Protocol[T_co]):
    """An iterator that can call its reader instead."""

    async def __anext__(self) -> T_co: ...

    def listen(self, listener: Listener[T_co] | None, /) -> None:
        """The listener gets each item, beginning with those that wait. None: not any more; what comes then waits for
        the iterator."""


class PushedItems(Generic[T]):
    """An asynchronous iterator over the items of one stream that need their reader's task: the first, and those that
    `write` does not take. All others go to `write`, as they come."""

    def __init__(self, source: PushingSource[T], write: Callable[[T], bool]) -> None:
        """`write` returns False for an item that it leaves to the task."""
        self._source = source
        self._write = write
        self._begun = False
        self._next: asyncio.Future[T]

    def __aiter__(self) -> PushedItems[T]:
        return self

    async def __anext__(self) -> T:
        if not self._begun:
            self._begun = True
            return await self._source.__anext__()
        self._next = asyncio.get_running_loop().create_future()
        try:
            self._source.listen(self)
            return await self._next
        finally:
            self._source.listen(None)

    def take(self, item: T) -> None:
        if self._next.done():  # the task is being cancelled
            return
        try:
            if self._write(item):
                return
        except Exception as error:
            self._next.set_exception(error)
        else:
            self._next.set_result(item)
        self._source.listen(None)

    def fail(self, error: Exception) -> None:
        if not self._next.done():
            self._next.set_exception(error)
