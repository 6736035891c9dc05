"""The live view of a run: on a terminal (rich), else a line now and then on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self, TextIO

from penstock.loadtest.messages import Sample
from penstock.loadtest.options import Options
from penstock.loadtest.progress import Progress
from penstock.loadtest.report.formatting import clean
from penstock.loadtest.workload import asked_requests

_LINE_SECONDS = 5.0


class Screen(Protocol):
    """Where progress is shown."""

    seconds: float
    """Between two looks."""

    def show(self, progress: Progress) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class Lines:
    """One line each time."""

    seconds = _LINE_SECONDS

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, progress: Progress) -> None:
        self.note("  ".join(f"{name} {text}" for name, text in progress.parts()))

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        return None


class Silence:
    """For `--no-live`: notes are printed all the same."""

    seconds = float("inf")

    def __init__(self, stream: TextIO) -> None:
        self.note = Lines(stream).note

    def show(self, progress: Progress) -> None:
        return None

    def close(self) -> None:
        return None


class LiveView:
    """`with LiveView(options) as view: view.update(samples, in_flight)`, as often as there is news, over all repeats.

    Costs little: samples are added up, and looked at four times a second at most (every five seconds without a
    terminal, or without rich).
    """

    def __init__(
        self, options: Options, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        target, load = options.target, options.load
        requests = asked_requests(options)
        requests = requests and requests * load.repeat
        seconds = load.duration and load.duration * load.repeat
        self._progress = Progress(requests, seconds)
        self._title = clean(f"{options.output.label or target.model or target.protocol} at {target.url}")
        self._enabled = options.output.live
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._screen: Screen = Silence(self._stream)
        self._started: float | None = None
        self._shown = clock()
        self._news = False

    def __enter__(self) -> Self:
        self._screen = _screen(self._stream, self._title) if self._enabled else Silence(self._stream)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._news:
            self._screen.show(self._progress)
        self._screen.close()

    def update(self, samples: Sequence[Sample], in_flight: int) -> None:
        """`samples`: those that have ended since the last time."""
        now = self._clock()
        if self._started is None:  # the run's start, not that of the warm-up before it
            self._started = now - max((sample.ended for sample in samples), default=0.0)
        self._progress.add(samples, in_flight, now - self._started)
        self._news = True
        if now - self._shown >= self._screen.seconds:
            self._shown, self._news = now, False
            self._screen.show(self._progress)

    def note(self, text: str) -> None:
        """A line that stays."""
        self._screen.note(clean(text))


def _screen(stream: TextIO, title: str) -> Screen:
    if not stream.isatty():
        return Lines(stream)
    try:
        from penstock.loadtest.terminal import Terminal  # needs rich
    except ImportError:
        lines = Lines(stream)
        lines.note("for a live view: pip install 'penstock-server[loadtest]'")
        return lines
    return Terminal(stream, title)
