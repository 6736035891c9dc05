"""One `EngineStats` for several engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.engines.contract.engine_stats import GAUGES, EngineStats

_COUNTERS = tuple(name for name in EngineStats.__struct_fields__ if name not in (*GAUGES, "finished"))


@dataclass(slots=True)
class _Counted:
    """An engine's counters: what its processes counted that are gone, and what was last seen of the one that is."""

    before: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0))
    seen: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0))
    finished_before: Counter[str] = field(default_factory=Counter)
    finished_seen: Counter[str] = field(default_factory=Counter)

    def look(self, stats: EngineStats) -> None:
        now = {name: getattr(stats, name) for name in _COUNTERS}
        if any(now[name] < self.seen[name] for name in _COUNTERS):  # a new process, which counts from 0
            self.before = {name: self.before[name] + self.seen[name] for name in _COUNTERS}
            self.finished_before += self.finished_seen
        self.seen, self.finished_seen = now, Counter(stats.finished)


class MergedStats:
    """Gauges are summed up. So are counters, which go on where they were when an engine starts again from 0."""

    def __init__(self, num_engines: int) -> None:
        self._counted = [_Counted() for _ in range(num_engines)]

    def merge(self, stats: Sequence[EngineStats]) -> EngineStats:
        """`stats`: the newest of each engine, in the same order each time."""
        merged = EngineStats(**{name: sum(getattr(each, name) for each in stats) for name in GAUGES})
        finished: Counter[str] = Counter()
        for counted, newest in zip(self._counted, stats, strict=True):
            counted.look(newest)
            finished += counted.finished_before + counted.finished_seen
        for name in _COUNTERS:
            setattr(merged, name, sum(counted.before[name] + counted.seen[name] for counted in self._counted))
        merged.finished = dict(finished)
        return merged
