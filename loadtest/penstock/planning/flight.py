"""Requests of the simulated clients, and when their tokens came."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.engines.replicas.streams import ReplicatedStream

GAP_UNIT = 1e-6
"""Gaps between tokens are counted to a microsecond."""


class Prompt(list[int]):
    """Token ids, and whose they are: that stays with them wherever a gateway sends them."""

    __slots__ = ("flight",)
    flight: Flight


class Flight:
    """One request from its client's call to its end. Times are seconds of virtual time, as the client sees them."""

    __slots__ = (
        *("due", "ended", "error", "first", "index", "last", "longest_gap", "moved", "num_prompt_tokens"),
        *("num_tokens", "on_end", "output_tokens", "prompt", "stream"),
    )

    def __init__(self, index: int, prompt: Prompt, output_tokens: int, *, due: float) -> None:
        self.index = index
        self.prompt: Prompt | None = prompt
        """None once it has ended."""
        self.num_prompt_tokens = len(prompt)
        self.output_tokens = output_tokens
        """Asked for."""
        self.due = due
        """When the workload wanted it sent."""
        self.stream: ReplicatedStream | None = None
        self.first: float | None = None
        self.last = 0.0
        self.num_tokens = 0
        self.longest_gap: float | None = None
        self.moved = False
        """A replica has died with it, or refused it."""
        self.ended: float | None = None
        self.error = ""
        """Its kind, as load tests name them; empty: complete."""
        self.on_end: Callable[[Flight], None] | None = None

    def got(self, count: int, now: float, gap: float | None) -> None:
        """So many tokens have come, the last one now. `gap`: the longest between two of those of a leap, which follow
        the one before them; None: one token, as long after the one before as the clock says."""
        if self.first is None:
            self.first = now
        else:
            longest = now - self.last if gap is None else gap
            if self.longest_gap is None or longest > self.longest_gap:
                self.longest_gap = longest
        self.last = now
        self.num_tokens += count

    def end(self, now: float, error: str = "") -> None:
        """What it was sent with is given up: there may be a million of them."""
        self.ended, self.error = now, error
        stream, on_end = self.stream, self.on_end
        self.prompt = self.stream = self.on_end = None
        if stream is not None:
            stream.parts.clear()
        if on_end is not None:
            on_end(self)


class Gaps:
    """How often a gap between two tokens was how long, of all requests together."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def add(self, seconds: float, times: int = 1) -> None:
        if times:
            self.counts[round(seconds / GAP_UNIT)] += times
