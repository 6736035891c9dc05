"""Waiting requests that others may overtake, since they wait for something other than room in a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import chain

from penstock.engines.scheduler.request import Request


class PassedBy:
    """By what they wait for: it is looked at once in each step, however many wait for it."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, tuple[Callable[[], bool], dict[int, Request]]] = {}
        """For each reason: the function that says whether it still holds, and the requests by their ids."""
        self._reasons: dict[int, Hashable] = {}

    def __len__(self) -> int:
        return len(self._reasons)

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(requests.values() for _, requests in self._groups.values())

    def add(self, request: Request, reason: Hashable, is_blocked: Callable[[], bool]) -> None:
        """`is_blocked` says the same for all that have an equal reason."""
        self._groups.setdefault(reason, (is_blocked, {}))[1][request.id] = request
        self._reasons[request.id] = reason

    def remove(self, request: Request) -> bool:
        """False: it is not among them."""
        reason = self._reasons.pop(request.id, None)
        if reason is None:
            return False
        requests = self._groups[reason][1]
        del requests[request.id]
        if not requests:
            del self._groups[reason]
        return True

    @property
    def has_unblocked(self) -> bool:
        """Whether some of them wait for nothing any more."""
        return any(not is_blocked() for is_blocked, _ in self._groups.values())

    def take_unblocked(self) -> list[Request]:
        """Takes those out that wait for nothing any more."""
        reasons = [reason for reason, (is_blocked, _) in self._groups.items() if not is_blocked()]
        unblocked = [request for reason in reasons for request in self._groups.pop(reason)[1].values()]
        for request in unblocked:
            del self._reasons[request.id]
        return unblocked
