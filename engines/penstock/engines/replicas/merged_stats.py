"""One `EngineStats` for several engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from penstock.engines.contract.engine_stats import GAUGES, TIER_GAUGES, TIERS, EngineStats, TierStats

_GAUGES = (*GAUGES, *(f"{tier}.{name}" for tier in TIERS for name in TIER_GAUGES))
_COUNTERS = (
    *(name for name in EngineStats.__struct_fields__ if name not in (*GAUGES, *TIERS, "finished")),
    *(f"{tier}.{name}" for tier in TIERS for name in TierStats.__struct_fields__ if name not in TIER_GAUGES),
)


@dataclass(slots=True)
class _Counted:
    """An engine's counters: what its processes counted that are gone, and what was last seen of the one that is."""

    before: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0))
    seen: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0))
    finished_before: Counter[str] = field(default_factory=Counter)
    finished_seen: Counter[str] = field(default_factory=Counter)

    def look(self, stats: EngineStats) -> None:
        now = {name: attrgetter(name)(stats) for name in _COUNTERS}
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
        figures: dict[str, Any] = {name: sum(map(attrgetter(name), stats)) for name in _GAUGES}
        finished: Counter[str] = Counter()
        for counted, newest in zip(self._counted, stats, strict=True):
            counted.look(newest)
            finished += counted.finished_before + counted.finished_seen
        figures |= {
            name: sum(counted.before[name] + counted.seen[name] for counted in self._counted) for name in _COUNTERS
        }
        tiers: dict[str, Any] = {tier: TierStats(**_named(figures, f"{tier}.")) for tier in TIERS}
        own = {name: value for name, value in figures.items() if "." not in name}
        return EngineStats(finished=dict(finished), **own, **tiers)


def _named(figures: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Those whose names begin like this, without that."""
    return {name.removeprefix(prefix): value for name, value in figures.items() if name.startswith(prefix)}
