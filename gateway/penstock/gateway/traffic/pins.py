"""Which target each sequence runs on. A sequence stays where it began, whatever becomes of weights."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable

MAX_PINS = 1 << 16


class SequencePins:
    """The one used longest ago first. Times are passed in."""

    def __init__(self, most: int = MAX_PINS) -> None:
        self._most = most
        self._pins: OrderedDict[Hashable, tuple[str, float]] = OrderedDict()
        self._on: Counter[str] = Counter()
        """Sequences by target."""

    def __len__(self) -> int:
        return len(self._pins)

    def get(self, sequence: Hashable, now: float) -> str | None:
        target, until = self._pins.get(sequence, (None, now))
        return target if until > now else None

    def targets(self) -> set[str]:
        return set(self._on)

    def keep(self, sequence: Hashable, target: str, now: float, idle_seconds: float) -> None:
        """Until `drop`, or until nothing has come for so long. Beyond the bound the ones used longest ago go: they are
        chosen again by their id, which leads to the same target unless weights have changed."""
        self.drop(sequence)
        self._pins[sequence] = target, now + idle_seconds
        self._on[target] += 1
        while self._pins:
            first = next(iter(self._pins))
            if len(self._pins) <= self._most and self._pins[first][1] > now:
                break
            self.drop(first)

    def drop(self, sequence: Hashable) -> None:
        pin = self._pins.pop(sequence, None)
        if pin is not None:
            self._on[pin[0]] -= 1
            if not self._on[pin[0]]:
                del self._on[pin[0]]
