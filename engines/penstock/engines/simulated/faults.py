"""Faults to order: a prompt that contains a marker token makes the simulated engine misbehave."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

KINDS = ("hang", "raise", "nan", "kill")


class Faults:
    """Marker token id -> what happens in the step that computes it."""

    def __init__(self, markers: dict[int, str]) -> None:
        self._markers = markers

    @staticmethod
    def parse(text: str) -> Faults:
        """From "kind=token_id,...", e.g. "kill=7,nan=8". Kinds: hang, raise, nan, kill."""
        markers = {}
        for item in filter(None, text.split(",")):
            kind, separator, token_id = item.partition("=")
            if kind not in KINDS or not separator or not token_id.isdecimal():
                raise ValueError(f"a fault is one of {', '.join(KINDS)}, then =, then a token id; not {item!r}")
            markers[int(token_id)] = kind
        return Faults(markers)

    def of(self, token_ids: Sequence[int], start: int, end: int) -> str | None:
        """The fault of the first marker among positions start..end-1."""
        if not self._markers:
            return None
        return next((self._markers[t] for t in token_ids[start:end] if t in self._markers), None)

    @staticmethod
    def strike(kind: str) -> None:
        if kind == "raise":
            raise RuntimeError("a fault was ordered")
        # a stopped process is the most thorough hang there is: no thread of it runs, no signal handler either
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
