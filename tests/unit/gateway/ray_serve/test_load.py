"""How many replicas a load needs."""

from __future__ import annotations

import pytest

from penstock.engines.contract.engine_stats import EngineStats
from penstock.gateway.ray_serve.load import Load, load_of, replicas_for
from penstock.gateway.ray_serve.settings import Autoscaling

TARGETS = Autoscaling(min_replicas=1, max_replicas=8, target_waiting=2, target_running=0.5, target_kv_usage=0.8)


def wanted(replicas: int, queued: float = 0, **means: float) -> int:
    return replicas_for({name: [mean] * replicas for name, mean in means.items()}, queued, replicas, TARGETS)


@pytest.mark.parametrize(
    ("load", "number"),
    [
        ({"waiting": 0, "running": 0, "kv_usage": 0}, 1),
        ({"waiting": 2, "running": 0.1, "kv_usage": 0.1}, 2),
        ({"waiting": 6, "running": 0.1, "kv_usage": 0.1}, 6),
        ({"waiting": 0, "running": 1.0, "kv_usage": 0.1}, 4),
        ({"waiting": 0, "running": 0.1, "kv_usage": 0.99}, 3),
        ({"waiting": 100, "running": 1, "kv_usage": 1}, 8),
    ],
)
def test_the_figure_that_is_farthest_above_its_target_decides(load, number):
    assert wanted(2, **load) == number


def test_what_waits_at_the_proxies_counts_as_waiting():
    assert wanted(1, queued=6, waiting=0, running=0.1, kv_usage=0) == 3


def test_a_load_near_its_target_changes_nothing():
    assert wanted(4, running=0.52) == 4
    assert wanted(4, running=0.48) == 4
    assert wanted(4, running=0.4) == 4  # 3.2 replicas
    assert wanted(4, running=0.35) == 3


def test_without_figures_there_are_as_few_as_may_be():
    assert replicas_for({}, 0, 3, TARGETS) == 1


def test_the_load_is_that_of_the_fullest_engine():
    one = EngineStats(num_running=2, num_waiting=1, num_blocks=10, num_free_blocks=5)
    other = EngineStats(num_running=4, num_waiting=2, num_blocks=10, num_free_blocks=9)
    assert load_of([one, other], 8) == Load(waiting=3, running=0.5, kv_usage=0.5)
    assert load_of([], 8) == Load(0, 0, 0)
