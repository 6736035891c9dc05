"""All requests, from their first byte to their end: those in flight, and hooks for those that begin and end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextvars import ContextVar

from penstock.gateway.front.context import RequestContext

current_request: ContextVar[str] = ContextVar("current_request", default="")
"""Id of the request that the current task works for, for log lines."""

Hook = Callable[[RequestContext], None]


def name_request(record: logging.LogRecord) -> bool:
    """A logging filter that keeps every line, and adds the id of the request that it was written for."""
    request = current_request.get()
    record.request = f" (request {request})" if request else ""
    return True


def be_strict(context: RequestContext) -> None:
    """A hook for requests that begin: what `ignore` would note is refused."""
    context.strict = True


class RequestJournal:
    """Every request that begins ends, once. Lives on the event loop."""

    def __init__(
        self, on_end: Iterable[Hook] = (), on_begin: Iterable[Hook] = (), on_leave: Iterable[Hook] = ()
    ) -> None:
        self._on_end = tuple(on_end)
        self._on_begin = tuple(on_begin)
        self._on_leave = tuple(on_leave)
        self._in_flight: dict[RequestContext, None] = {}

    def begin(self, context: RequestContext) -> None:
        self._in_flight[context] = None
        current_request.set(context.id)
        for tell in self._on_begin:
            tell(context)

    def end(self, context: RequestContext) -> None:
        """Idempotent."""
        if context in self._in_flight:
            del self._in_flight[context]
            context.end()
            for tell in self._on_end:
                tell(context)

    def leave(self, context: RequestContext) -> None:
        """Another process has taken the request over, and reports its end: here only `on_leave` is called."""
        if context in self._in_flight:
            del self._in_flight[context]
            context.end()
            for tell in self._on_leave:
                tell(context)

    def in_flight(self) -> tuple[RequestContext, ...]:
        """The oldest first."""
        return tuple(self._in_flight)
