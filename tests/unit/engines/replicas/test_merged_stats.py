"""Several engines' numbers as one's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.contract.engine_stats import EngineStats, TierStats
from penstock.engines.replicas.merged_stats import MergedStats

grown = st.tuples(st.integers(0, 2), st.integers(0, 5), st.booleans())
"""Which engine, by how much, and whether it is restarted first."""


@given(st.lists(grown, max_size=30))
def test_counters_never_fall_and_count_everything(events: list[tuple[int, int, bool]]) -> None:
    merged, engines, total = MergedStats(3), [EngineStats() for _ in range(3)], 0
    for engine, more, restarted in events:
        if restarted:
            engines[engine] = EngineStats()
            assert merged.merge(engines).steps == total
        engines[engine].steps += more
        engines[engine].offload = TierStats(saved=engines[engine].steps, blocks=1)
        engines[engine].finished = {"stop": engines[engine].steps}
        total += more
        now = merged.merge(engines)
        assert now.steps == now.offload.saved == total
        assert now.offload.blocks == sum(stats.offload.blocks for stats in engines)
        assert now.finished.get("stop", 0) == total


def test_gauges_are_of_this_moment() -> None:
    merged = MergedStats(2)
    merged.merge([EngineStats(num_running=3, num_blocks=10, num_free_blocks=4), EngineStats(num_running=2)])
    now = merged.merge([EngineStats(), EngineStats(num_running=1, num_blocks=5, num_free_blocks=5)])
    assert (now.num_running, now.num_blocks, now.num_free_blocks) == (1, 5, 5)
