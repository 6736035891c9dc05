"""The loaded models, their uses, and which of them may be unloaded; and the loads that failed. Plain data: times are
passed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

FIRST_PAUSE = 10.0
LONGEST_PAUSE = 300.0


@dataclass(slots=True)
class Failure:
    reason: str
    pause: float
    """Seconds."""
    until: float


class Failures:
    """Of each model, the last load if it failed. Each further failure in a row doubles the pause."""

    def __init__(self) -> None:
        self._by_name: dict[str, Failure] = {}

    def add(self, name: str, reason: str, now: float) -> Failure:
        before = self._by_name.pop(name, None)
        pause = FIRST_PAUSE if before is None else min(2 * before.pause, LONGEST_PAUSE)
        failure = self._by_name[name] = Failure(reason, pause, now + pause)
        return failure

    def current(self, name: str, now: float) -> Failure | None:
        """While the model may not be tried again."""
        failure = self._by_name.get(name)
        return failure if failure is not None and now < failure.until else None

    def forget(self, name: str) -> None:
        """It has been loaded, or a load was asked for."""
        self._by_name.pop(name, None)


MOST_RESIDENCE = 60.0
"""Seconds that a model may count on at most."""

IsBusy = Callable[[str], bool]
"""Whether a model has work that no use tells of: an open sequence, a reload."""


@dataclass(slots=True)
class Resident:
    """A loaded model."""

    last_used: float
    safe_until: float
    """It has just been loaded: nobody unloads it before this time."""
    parts: frozenset[str]
    """Of an ensemble: the models that it is made of."""
    kept: bool
    """It is never unloaded to make room."""
    idle_seconds: float | None = None
    """How long it stays without a use, where a request has said so."""

    def idle_until(self, usual_seconds: float) -> float:
        seconds = usual_seconds if self.idle_seconds is None else self.idle_seconds
        return max(self.safe_until, self.last_used + seconds)


class Residents:
    """An ensemble and its models belong together: what uses or keeps the ensemble, uses or keeps its models."""

    def __init__(self) -> None:
        self._loaded: dict[str, Resident] = {}
        self._uses: Counter[str] = Counter()
        """By name. A model may be used before it is loaded: by those that wait for it."""

    def __contains__(self, name: str) -> bool:
        return name in self._loaded

    def begin(self, name: str, now: float) -> None:
        self._uses[name] += 1
        self._touch(name, now)

    def end(self, name: str, now: float) -> None:
        """Ends one use."""
        self._uses[name] -= 1
        if not self._uses[name]:
            del self._uses[name]
        self._touch(name, now)

    def loaded(self, name: str, now: float, took: float, parts: Iterable[str] = (), *, kept: bool = False) -> None:
        """A model that took so many seconds to load stays for as long at least: otherwise a server with too little
        memory would do nothing but load. Loading it again, while it serves, counts as a new start."""
        self._loaded[name] = Resident(now, now + min(took, MOST_RESIDENCE), frozenset(parts), kept)

    def keep(self, name: str, seconds: float, safe_until: float) -> None:
        """A loaded model stays for so long without a use, and is not safe after `safe_until`."""
        resident = self._loaded[name]
        resident.idle_seconds = seconds
        resident.safe_until = min(resident.safe_until, safe_until)

    def left(self, name: str) -> None:
        """It is being unloaded. Nothing happens if it was not loaded."""
        self._loaded.pop(name, None)

    def used(self, name: str) -> bool:
        """Whether a request uses it, or an ensemble that it is part of."""
        return any(self._uses[member] for member in self._with_ensembles(name))

    def kept(self) -> frozenset[str]:
        """What is never unloaded to make room."""
        return frozenset(
            name for name in self._loaded if any(self._loaded[member].kept for member in self._with_ensembles(name))
        )

    def free(self, now: float, busy: IsBusy) -> list[str]:
        """What may be unloaded now, the least recently used first."""
        return [name for name in self._by_last_use() if self._replaceable(name, now, busy) and not self.used(name)]

    def replaceable(self, now: float, busy: IsBusy) -> list[str]:
        """The same, and what could be as soon as the requests that use it have ended."""
        return [name for name in self._by_last_use() if self._replaceable(name, now, busy)]

    def idle_since(self, name: str) -> float:
        """The last use of a loaded model, and of the ensembles that it is part of."""
        return max(self._loaded[member].last_used for member in self._with_ensembles(name))

    def idle_until(self, name: str, usual_seconds: float) -> float:
        """When a loaded model has been idle for long enough to go, if nothing uses it until then."""
        return max(self._loaded[member].idle_until(usual_seconds) for member in self._with_ensembles(name))

    def idle_ends(self, usual_seconds: float) -> dict[str, float]:
        """The same of all that are not kept and that nothing uses now."""
        kept = self.kept()
        unused = [name for name in self._loaded if name not in kept and not self.used(name)]
        return {name: self.idle_until(name, usual_seconds) for name in unused}

    def has_own_idle_time(self, name: str) -> bool:
        return name in self._loaded and self._loaded[name].idle_seconds is not None

    def next_end_of_safety(self, now: float) -> float | None:
        """When the next one that is safe now is so no longer."""
        return min(
            (resident.safe_until for resident in self._loaded.values() if resident.safe_until > now), default=None
        )

    def with_parts(self, name: str) -> list[str]:
        """The model, and what it is made of, directly or not."""
        names = [name]
        for member in names:
            parts = self._loaded[member].parts if member in self._loaded else ()
            names += [part for part in sorted(parts) if part not in names]
        return names

    def _by_last_use(self) -> list[str]:
        return sorted(self._loaded, key=self.idle_since)

    def _replaceable(self, name: str, now: float, busy: IsBusy) -> bool:
        return not any(
            self._loaded[member].kept or self._loaded[member].safe_until > now or busy(member)
            for member in self._with_ensembles(name)
        )

    def _with_ensembles(self, name: str) -> list[str]:
        """The model if it is loaded, and all loaded ensembles that it is part of, directly or not."""
        names = [name]
        for member in names:
            names += [other for other, one in self._loaded.items() if member in one.parts and other not in names]
        return [member for member in names if member in self._loaded]

    def _touch(self, name: str, now: float) -> None:
        if (resident := self._loaded.get(name)) is not None:
            resident.last_used = now


def choose(candidates: Sequence[str], enough: Callable[[Collection[str]], bool]) -> list[str] | None:
    """Of `candidates`, the first ones that make room together, without those that need not go. None: all of them
    together would not be enough. `enough` must not say no for more models than it says yes for."""
    chosen: list[str] = []
    for name in candidates:
        chosen.append(name)
        if enough(chosen):
            break
    else:
        return None
    for name in reversed(chosen[:-1]):
        rest = [candidate for candidate in chosen if candidate != name]
        if enough(rest):
            chosen = rest
    return chosen
