"""What the host knows of a request's caller, and what it notes for the front that the caller is at."""

from __future__ import annotations

import time

from penstock.gateway.model_host.messages import TraceFields

_MAX_CALLS = 128
"""Of other models that are told; there may be any number."""


class FrontCaller:
    """A `messages.Caller`."""

    __slots__ = ("calls", "id", "traceparent")

    def __init__(self, id: str, traceparent: str) -> None:
        self.id = id
        self.traceparent = traceparent
        self.calls: list[tuple[str, float, float]] = []

    def called(self, model: str, started: float, ended: float) -> None:
        if len(self.calls) < _MAX_CALLS:
            self.calls.append((model, started, ended))


class NotedTrace:
    """A `messages.Trace` whose notes go back with the final response: the front writes the trace. Safe to mark from any
    thread."""

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields = TraceFields([], [])

    def mark(self, event: str, ns: int) -> None:
        self.fields.marks.append((event, ns))

    def child(self, model: str, version: int) -> NotedTrace:
        found = NotedTrace()
        found.mark("REQUEST_START", time.monotonic_ns())
        self.fields.children.append((model, version, found.fields))
        return found

    def finish(self) -> None:
        """Nothing: the front finishes it."""
