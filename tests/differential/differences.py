"""The one table of what differs from Triton 2.51, and why; docs/kserve.md shows it to users.

Anything else that differs fails the suite, and so does a row that no longer holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Any_: Final = object()
"""Any value."""


@dataclass(frozen=True)
class Difference:
    """`cases` are patterns of case names; `fields` has, for patterns of paths in an answer, Triton's value and ours."""

    id: str
    what: str
    triton: str
    ours: str
    why: str
    cases: tuple[str, ...] = ()
    fields: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)


DIFFERENCES: tuple[Difference, ...] = ()
