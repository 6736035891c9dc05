"""The settings of loading on demand, and the repository as it sees it."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDemandSettings:
    wait_seconds: float = 300.0
    """The longest that a request waits for its model."""
    most_waiting: int = 1024
    """Requests that wait at the same time, for all models together."""
    idle_seconds: float = 0.0
    """A model that nobody has used for so long is unloaded; 0: none is."""


class Loads(Protocol):
    """Lives on the event loop."""

    async def exists(self, name: str) -> bool:
        """Whether a repository has the model. Looks again for a name that it does not know, but not each time."""
        ...

    def generates(self, name: str) -> bool | None:
        """Whether chats may be for it: a language model, or another server's. None: not known before it has been
        loaded, as it lies in a store far away."""
        ...

    def is_upstream(self, name: str) -> bool:
        """Whether it is another server's, as far as it is known."""
        ...

    def stored(self) -> list[str]:
        """The names of all models of the repositories, as last seen."""
        ...

    def knows(self, name: str) -> bool:
        """Whether `stored` has it."""
        ...

    def serves(self, name: str) -> bool: ...

    def is_busy(self, name: str) -> bool:
        """It has open sequences, runs something, or is being loaded again: it must not be unloaded now."""
        ...

    def keeps_sequences(self, name: str) -> bool:
        """Requests belong together: none of them may be held back while others run."""
        ...

    async def load_stored(self, name: str) -> None:
        """Loads the model as it lies in its repository. Raises PenstockError."""
        ...

    def retire(self, name: str, reason: str) -> Awaitable[None]:
        """From the call on nobody finds the model; to be awaited until its memory is free."""
        ...

    def without_slot(self) -> AbstractAsyncContextManager[None]:
        """Lets another model be loaded meanwhile, where the current task loads one."""
        ...
