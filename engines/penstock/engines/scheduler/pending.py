"""Things that a waiting request waits for other than room in a step, and the work beside the steps that brings them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.engines.contract.messages import AddRequest, CallReply, Grammar
from penstock.engines.errors import PenstockError


class Pending(Protocol):
    """An adapter that is being read, a grammar that is being compiled, blocks that are being fetched, a prompt that
    another request computes: one object for all requests that wait for the same. Others overtake them meanwhile."""

    @property
    def is_pending(self) -> bool:
        """It is neither there nor given up. Never true again once it was false."""
        ...

    @property
    def error(self) -> PenstockError | None:
        """Ends the requests that wait for it; None: they go on, with it or without."""
        ...


NeedsOf = Callable[[AddRequest], Sequence[Pending]]
"""What a request is known to wait for at its arrival. Called for a request that is not refused: the work may begin
then."""


def no_needs(message: AddRequest) -> Sequence[Pending]:
    """A NeedsOf where nothing works beside the steps."""
    return ()


class SideWork(Protocol):
    """Work beside the steps, on threads of its own. Owned by the engine's loop, which calls `advance` between steps
    while something is under way."""

    @property
    def under_way(self) -> Collection[object]:
        """What is not at its end; `advance` has nothing to do while this is empty."""
        ...

    @property
    def wakeups(self) -> Sequence[int]:
        """File descriptors that are readable while `advance` has something to take in."""
        ...

    @property
    def next_look(self) -> float | None:
        """Latest time of the next call of `advance`."""
        ...

    def advance(self) -> Sequence[CallReply]:
        """Takes in what is done, gives up what takes too long, and begins what is next. Returns the replies to
        commands that are due."""
        ...


@dataclass(eq=False, slots=True)
class Compilation:
    """A grammar on its way from its text to what a runner can follow (`Pending`). Shared by all requests with an equal
    grammar. It gets a result or an error, once."""

    grammar: Grammar
    give_up_at: float
    """In the engine's time: it gets an error then."""
    compiled: Any = None
    """What the runner made of it (`NewRequest.grammar`)."""
    error: PenstockError | None = None

    @property
    def is_pending(self) -> bool:
        return self.compiled is None and self.error is None
