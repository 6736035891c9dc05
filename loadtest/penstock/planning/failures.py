"""What fails, and when."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from penstock.loadtest.errors import LoadTestError

_FORM = re.compile(r"(replica|zone)=(\d+)@(\d+(?:\.\d+)?)(?:\+(\d+(?:\.\d+)?))?")


class Failure(msgspec.Struct, frozen=True):
    """`replica=3@30`, `zone=1@60+120`"""

    kind: str
    """`replica` or `zone`."""
    number: int
    """Counted from 0."""
    at: float
    """Seconds after the beginning."""
    lasts: float | None
    """Seconds until its replicas can start again. None: a replica starts at once, a zone stays away."""

    def __str__(self) -> str:
        return f"{self.kind}={self.number}@{self.at:g}" + (f"+{self.lasts:g}" if self.lasts is not None else "")


def parse_failures(texts: Sequence[str], replicas: int, zones: int) -> list[Failure]:
    """`replicas`: that there can be. Raises LoadTestError."""
    found = []
    for text in texts:
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise LoadTestError(f"failure: {text!r} is not like replica=3@30 or zone=1@60+120")
        kind, number, at, lasts = match.groups()
        most = zones if kind == "zone" else replicas
        if int(number) >= most:
            raise LoadTestError(f"failure: {text!r}: there are {most} {kind}s, counted from 0")
        found.append(Failure(kind, int(number), float(at), None if lasts is None else float(lasts)))
    return found
