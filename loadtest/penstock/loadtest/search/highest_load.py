"""The highest load that holds, by trying: doubling until something fails, then halving the interval (on a logarithmic
scale). What a single try says is not taken for the truth: near the bound there are more of them, and the answer is
checked from both sides."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

_BEST_OF = 3
_ABOVE = 1.25
"""How far above a failure a look is taken: does everything fail there?"""
_DIGITS = 3
"""Of values that are tried, so that people can write them."""


class Trial(NamedTuple):
    held: bool
    close: bool = False
    """Another run might say the other thing: it is decided by the best of three."""
    invalid: str = ""
    """Why it says nothing; ends the search."""


class HighestLoad(NamedTuple):
    """Between what held and what failed."""

    held: float | None
    """The highest value that held, below all that failed."""
    failed: float | None
    """The lowest one that failed."""
    outcome: str
    """As in `FindReport`."""
    notes: list[str]


class _Over(Exception):
    """Nothing more can be tried; the text is the outcome."""


class HighestLoadSearch:
    """`interval` is what is known at any time."""

    def __init__(
        self,
        attempt: Callable[[float], Trial],
        *,
        start: float,
        least: float,
        whole: bool,
        precision: float,
        max_runs: int,
        tries: int = 1,
    ) -> None:
        """`least`: the value below which nothing is tried. `whole`: values are whole numbers. `precision`: how near
        what held and what failed shall be, as a share. `tries`: runs of each value, at least."""
        self._attempt = attempt
        self._start = max(start, least)
        self._least = least
        self._whole = whole
        self._precision = precision
        self._runs_left = max_runs
        self._tries = tries
        self._trials: dict[float, list[Trial]] = {}
        self._sure: set[float] = set()
        """Values that were tried once more, by themselves."""
        self._notes: list[str] = []

    def run(self) -> HighestLoad:
        try:
            outcome = self._search()
        except _Over as over:
            outcome = "found" if str(over) == "client-bound" and self._near_enough() else str(over)
        return self.result(outcome)

    def result(self, outcome: str) -> HighestLoad:
        held, failed = self.interval()
        beyond = [value for value in self._trials if failed is not None and value > failed and self._held(value)]
        if beyond:
            values = ", ".join(f"{value:g}" for value in sorted(beyond))
            self._notes.append(f"not monotone: {values} held, though {failed:g} failed; the answer is the lower one")
        return HighestLoad(held, failed, outcome, self._notes)

    def interval(self) -> tuple[float | None, float | None]:
        """The highest value that held below the lowest one that failed."""
        failed = min((value for value in self._trials if not self._held(value)), default=None)
        held = [value for value in self._trials if self._held(value) and (failed is None or value < failed)]
        return max(held, default=None), failed

    def _search(self) -> str:
        while True:
            held, failed = self.interval()
            if failed is None:
                self._try(self._start if held is None else self._readable(2 * held))
            elif held is None:
                if failed <= self._least:
                    return "nothing held"
                self._try(max(self._least, self._readable(failed / 2)))
            elif (middle := self._middle(held, failed)) is not None:
                self._try(middle)
            elif self._checked(held, failed):
                return "found"

    def _checked(self, held: float, failed: float) -> bool:
        """Whether both ends stand. The lower one is tried again; if even more than the upper one holds, that is too."""
        if held not in self._sure:
            self._sure.add(held)
            self._once_more(held)
            return False
        above = self._readable(max(_ABOVE * failed, failed + self._whole))
        if above not in self._trials:
            self._try(above)
            return False
        if self._held(above) and failed not in self._sure:
            self._sure.add(failed)
            self._once_more(failed)
            return False
        return True

    def _near_enough(self) -> bool:
        held, failed = self.interval()
        return held is not None and failed is not None and self._middle(held, failed) is None

    def _middle(self, held: float, failed: float) -> float | None:
        """None: they are as near as was asked for."""
        if failed <= held * (1 + self._precision) or (self._whole and failed - held <= 1):
            return None
        middle = self._readable(math.sqrt(held * failed))
        return middle if held < middle < failed else None

    def _readable(self, value: float) -> float:
        if self._whole:
            return float(max(1, round(value)))
        return round(value, _DIGITS - 1 - math.floor(math.log10(value)))

    def _try(self, value: float) -> None:
        """Until it is decided: at once, or if it was a close thing by the best of three."""
        while len(trials := self._trials.get(value, [])) < self._tries or (
            any(trial.close for trial in trials) and not _settled(trials)
        ):
            self._run(value)

    def _once_more(self, value: float) -> None:
        self._run(value)
        if not _settled(self._trials[value]):
            self._run(value)

    def _run(self, value: float) -> None:
        if not self._runs_left:
            raise _Over("unfinished")
        self._runs_left -= 1
        trial = self._attempt(value)
        if trial.invalid:
            self._notes.append(f"{value:g}: {trial.invalid}")
            raise _Over("client-bound")
        self._trials.setdefault(value, []).append(trial)

    def _held(self, value: float) -> bool:
        """By most of its trials; a tie is a failure."""
        trials = self._trials[value]
        return 2 * sum(trial.held for trial in trials) > len(trials)


def _settled(trials: list[Trial]) -> bool:
    """Whether one side has what wins the best of three, and leads."""
    held = sum(trial.held for trial in trials)
    failed = len(trials) - held
    return held != failed and max(held, failed) > _BEST_OF // 2
