"""Which target each sequence runs on. A sequence stays where it began, whatever becomes of weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

MAX_PINS = 1 << 16


class SequencePins:
    """The one used longest ago first. Times are passed in."""

    def __init__(self, most: int = MAX_PINS) -> None:
        self._most = most
        self._pins: OrderedDict[Hashable, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pins)

    def get(self, sequence: Hashable) -> str | None:
        pin = self._pins.get(sequence)
        return None if pin is None else pin[0]

    def targets(self) -> set[str]:
        return {target for target, _ in self._pins.values()}

    def keep(self, sequence: Hashable, target: str, now: float, idle_seconds: float) -> None:
        """Until `drop`, or until nothing has come for so long. Beyond the bound the ones used longest ago go: they are
        chosen again by their id, which leads to the same target unless weights have changed."""
        self._pins[sequence] = target, now + idle_seconds
        self._pins.move_to_end(sequence)
        while self._pins:
            first = next(iter(self._pins))
            if len(self._pins) <= self._most and self._pins[first][1] > now:
                break
            del self._pins[first]

    def drop(self, sequence: Hashable) -> None:
        self._pins.pop(sequence, None)
