"""What a proxy tells its request router of a request, in the one header of which Serve's routers see the value."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.ray_serve.prefix_key import session_hash

MARK = "penstock1:"
"""What such a value begins with."""


@dataclass(frozen=True, slots=True)
class RouteKey:
    hashes: tuple[str, ...] = ()
    """Of the prompt's beginnings, the shortest first, and last that of the session."""
    avoid: tuple[str, ...] = ()
    """Names of replicas that could not serve the request."""

    def __str__(self) -> str:
        return f"{MARK}{'.'.join(self.hashes)};{'.'.join(self.avoid)}" if self.hashes or self.avoid else ""

    @classmethod
    def read(cls, text: str) -> RouteKey:
        """Also from the name of a session, which no proxy of ours has seen."""
        if not text.startswith(MARK):
            return cls((session_hash(text),) if text else ())
        hashes, _, avoid = text.removeprefix(MARK).partition(";")
        return cls(_names(hashes), _names(avoid))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(".")) if text else ()
