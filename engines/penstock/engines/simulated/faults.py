"""Faults to order: a prompt that contains a marker token makes the simulated engine misbehave."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import NamedTuple

KINDS = ("hang", "kill", "nan", "raise", "slow", "stall")
_SLOW_SECONDS = 10.0


class Fault(NamedTuple):
    """What happens in the step that computes a marker token of a prompt.

    hang: the process stands still; kill: it dies; nan: the logits of this request are not numbers; raise: the step
    raises; slow: it takes `seconds` longer; stall: it does not end before the runner is closed.
    """

    kind: str
    seconds: float


class Faults:
    """Marker token id -> what happens in the step that computes it."""

    def __init__(self, markers: dict[int, Fault]) -> None:
        self._markers = markers

    @staticmethod
    def parse(text: str) -> Faults:
        """From "kind=token_id,...", e.g. "kill=7,nan=8,slow=9:2.5"; see `Fault` for the kinds. The number behind the
        colon is how many seconds a slow step takes."""
        markers = {}
        for item in filter(None, text.split(",")):
            kind, separator, marker = item.partition("=")
            token_id, colon, seconds = marker.partition(":")
            wrong = kind not in KINDS or not separator or not token_id.isdecimal()
            if wrong or (colon and (kind != "slow" or not _is_number(seconds))):
                raise ValueError(
                    f"a fault is one of {', '.join(KINDS)}, then =, then a token id (for slow, then : and seconds, if "
                    f"you like); not {item!r}"
                )
            markers[int(token_id)] = Fault(kind, float(seconds) if colon else _SLOW_SECONDS)
        return Faults(markers)

    def __bool__(self) -> bool:
        return bool(self._markers)

    def of(self, token_ids: Sequence[int], start: int, end: int) -> Fault | None:
        """The fault of the first marker among positions start..end-1."""
        return next((self._markers[t] for t in token_ids[start:end] if t in self._markers), None)


def strike(kind: str) -> None:
    """Ends this process, or stops it: the most thorough hang there is, since no thread of it runs and no signal handler
    either."""
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()
