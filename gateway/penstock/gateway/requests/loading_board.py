"""The board of models that are being loaded: for the log, the index of models, readiness, and the errors of requests
that come too early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from penstock.engines.contract.loading import Loading, LoadingEnds

Later = Callable[[float, Callable[[], None]], object]
"""Calls back after so many seconds, as `loop.call_later` does."""

_REFRESH_SECONDS = 1.0


def _later(seconds: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, call)


class LoadingView(Protocol):
    """Shows an operator what is being loaded."""

    def show(self, name: str, loading: Loading, seconds: float) -> None:
        """`seconds` since the model's loading began. Called with each report, and once a second without one."""
        ...

    def clear(self) -> None:
        """Nothing is loaded at the moment."""
        ...


@dataclass(slots=True)
class _Entry:
    names: tuple[str, ...]
    loading: Loading | None = None
    """None: nothing is known yet."""
    since: float = field(default_factory=time.monotonic)


class LoadingBoard:
    """Lives on the event loop. A model may have several names; it is shown under the first."""

    def __init__(self, view: LoadingView | None = None, later: Later = _later) -> None:
        self._view = view
        self._later = later
        self._refreshing = False
        self._entries: dict[str, _Entry] = {}
        """By each name."""

    def announce(self, names: Iterable[str]) -> None:
        """A model with these names is going to be loaded."""
        entry = _Entry(tuple(names))
        self._entries.update(dict.fromkeys(entry.names, entry))

    def reporter(self, names: Iterable[str]) -> LoadingEnds:
        names = tuple(names)
        return lambda loading: self._end(names) if loading is None else self._report(names, loading)

    def _report(self, names: tuple[str, ...], loading: Loading) -> None:
        if names[0] not in self._entries:
            self.announce(names)
        entry = self._entries[names[0]]
        entry.loading = loading
        self._show(entry)
        if self._view is not None and not self._refreshing:
            self._refreshing = True
            self._later(_REFRESH_SECONDS, self._refresh)

    def _show(self, entry: _Entry) -> None:
        if self._view is not None and entry.loading is not None:
            self._view.show(entry.names[0], entry.loading, time.monotonic() - entry.since)

    def _refresh(self) -> None:
        """Many stages report once and then take minutes: what is shown must go on by itself."""
        self._refreshing = bool(self._entries)
        if self._refreshing:
            for entry in {entry.names: entry for entry in self._entries.values()}.values():
                self._show(entry)
            self._later(_REFRESH_SECONDS, self._refresh)

    def _end(self, names: tuple[str, ...]) -> None:
        for name in names:
            self._entries.pop(name, None)
        if self._view is not None and not self._entries:
            self._view.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        return list(self._entries)

    def text(self, name: str) -> str:
        """How far it is; "" where nothing is known, or nothing of this name is loaded."""
        entry = self._entries.get(name)
        return "" if entry is None or entry.loading is None else str(entry.loading)

    def texts(self) -> Mapping[str, str]:
        """Of all that is loaded, by name."""
        return {name: self.text(name) for name in self._entries}


class LoadingLog:
    """Lines in the log, for loads that take longer than a moment: one for each stage, one every few seconds while there
    is progress, and one every half minute without any."""

    _PATIENCE, _INTERVAL, _SILENCE = 1.0, 5.0, 30.0

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._said: dict[str, tuple[Loading, float]] = {}
        """What a model's last line was about, and its time."""

    def show(self, name: str, loading: Loading, seconds: float) -> None:
        if seconds < self._PATIENCE:
            return
        now = self._clock()
        last, at = self._said.get(name, (None, 0.0))
        interval = self._SILENCE if loading == last else self._INTERVAL
        if last is not None and loading.stage == last.stage and now - at < interval:
            return
        self._said[name] = (loading, now)
        self._say(f"loading {name}: {loading}")

    def clear(self) -> None:
        self._said.clear()
