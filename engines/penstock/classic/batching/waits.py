"""Waits of models for models: who waits for whom, and what would wait for ever. Plain data, no clock.

A model executes in as many places as it has instances. An execution that has asked another model keeps its place until
the answer is there. When all places of a model are kept by executions that wait for queues which cannot move either,
nothing in its queue will ever be executed.
"""

from __future__ import annotations


class Places:
    """The instances of a model, in front of which its queue waits."""

    __slots__ = ("blocked", "count")

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.blocked: set[Execution] = set()
        """The executions in them that wait for other requests."""

    def moves(self, stuck: set[Wait]) -> bool:
        return len(self.blocked) < self.count or not stuck.issuperset(self.blocked)


class Execution:
    """What one instance executes, as far as it makes requests to other models."""

    __slots__ = ("_places", "waits")

    def __init__(self, places: Places) -> None:
        """`places`: of the model that executes."""
        self._places = places
        self.waits: dict[object, Wait] = {}
        """For each request of it that has not ended: the queue that it is in, or what executes it."""

    def moves(self, stuck: set[Wait]) -> bool:
        return stuck.isdisjoint(self.waits.values())

    def wait(self, request: object, queue: Places) -> bool:
        """A request of it is in this queue from now on. False, and then it is not, if it would stay there for ever."""
        self.waits[request] = queue
        self._places.blocked.add(self)
        if not is_stuck(queue):
            return True
        self.leave(request)
        return False

    def begin(self, request: object, execution: Execution) -> None:
        """The request is in the queue no longer, but part of what another instance executes."""
        self.waits[request] = execution

    def leave(self, request: object) -> None:
        """The request has ended. Idempotent."""
        self.waits.pop(request, None)
        if not self.waits:
            self._places.blocked.discard(self)

    def end(self) -> None:
        """Its place is free."""
        self.waits.clear()
        self._places.blocked.discard(self)


Wait = Places | Execution


def is_stuck(queue: Places) -> bool:
    """Whether nothing in this queue can ever be executed. Of all that it could depend on, what can move is taken away,
    until the rest only waits for itself."""
    rest: set[Wait] = {queue}
    waits: list[Wait] = [queue]
    while waits:
        one = waits.pop()
        new = {*(one.blocked if isinstance(one, Places) else one.waits.values())} - rest
        rest |= new
        waits += new
    while free := {one for one in rest if one.moves(rest)}:
        rest -= free
    return queue in rest
