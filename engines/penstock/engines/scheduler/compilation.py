"""A grammar on its way from its text to what a runner can follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.engines.contract.messages import AddRequest, Grammar
from penstock.engines.errors import PenstockError


@dataclass(eq=False, slots=True)
class Compilation:
    """Shared by all requests with an equal grammar. It gets a result or an error, once."""

    grammar: Grammar
    give_up_at: float
    """In the engine's time: it gets an error then."""
    compiled: Any = None
    """What the runner made of it (`NewRequest.grammar`)."""
    error: PenstockError | None = None

    @property
    def is_pending(self) -> bool:
        return self.compiled is None and self.error is None


CompilationOf = Callable[[AddRequest], Compilation | None]
"""Of a request's grammar; None where it has none."""


def no_compilation(message: AddRequest) -> None:
    """A CompilationOf where nothing compiles grammars."""
