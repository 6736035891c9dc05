"""What is being loaded, for everybody who asks: the log, the index of models, readiness, refused requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from penstock.engines.contract.loading import Loading, LoadingEnds


class LoadingView(Protocol):
    """Where an operator sees it."""

    def show(self, name: str, loading: Loading, seconds: float) -> None:
        """`seconds` since the model's loading began."""
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

    def __init__(self, view: LoadingView | None = None) -> None:
        self._view = view
        self._entries: dict[str, _Entry] = {}
        """By each name."""

    def announce(self, names: Iterable[str]) -> None:
        """A model of these names is going to be loaded; nothing of it is here yet."""
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
        if self._view is not None:
            self._view.show(names[0], loading, time.monotonic() - entry.since)

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
    """Lines in the log, for loads that take longer than a moment: one for each stage, and one every few seconds."""

    _PATIENCE, _INTERVAL = 1.0, 5.0

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._said: dict[str, tuple[str, float]] = {}
        """The stage of a model's last line, and its time."""

    def show(self, name: str, loading: Loading, seconds: float) -> None:
        if seconds < self._PATIENCE:
            return
        stage, at = self._said.get(name, ("", 0.0))
        now = self._clock()
        if loading.stage != stage or now - at >= self._INTERVAL:
            self._said[name] = (loading.stage, now)
            self._say(f"loading {name}: {loading}")

    def clear(self) -> None:
        self._said.clear()
