"""Prompts that a request has asked to keep: evicted after all others, for their time, within a bound."""

from __future__ import annotations

import pytest

from penstock.engines.core import EngineCore
from penstock.engines.simulated import SimulatedConfig, SimulatedRunner
from penstock.engines.simulated.batcher import SimulatedBatcher, SimulatedBatcherConfig
from penstock.kvcache import KVGroup
from support.engine import Driver
from support.simulated import generate

SIZE = 4
BLOCKS = 32
"""Of each group."""
PROMPT = [100 + n for n in range(32)]
GROUPS = [(KVGroup(SIZE),), (KVGroup(SIZE), KVGroup(SIZE, 6))]
NAMES = ["one group", "a window"]


def start(groups: tuple[KVGroup, ...] = GROUPS[0]) -> Driver:
    config = SimulatedConfig(kv_groups=groups, num_blocks=BLOCKS * len(groups))
    return Driver(SimulatedRunner(config, sleep=lambda _: None))


def prompt(number: int) -> list[int]:
    """Of the length of PROMPT, with another beginning."""
    return [1000 + 50 * number + n for n in range(32)]


def ask(driver: Driver, tokens: list[int], tenant: str = "", keep: int = 0) -> int:
    """How many of the prompt's tokens were cached."""
    [request] = driver.add(tokens, 2, tenant=tenant, keep=keep)
    driver.run()
    assert driver.tokens[request] == generate(driver.core.info, tokens, 2)
    return driver.cached[request]


def flood(driver: Driver, first: int = 50, count: int = 12) -> None:
    """More than the cache can hold."""
    for number in range(first, first + count):
        ask(driver, prompt(number))


@pytest.mark.parametrize("groups", GROUPS, ids=NAMES)
def test_a_kept_prompt_outlives_a_flood(groups: tuple[KVGroup, ...]) -> None:
    driver = start(groups)
    ask(driver, PROMPT, keep=300)
    ask(driver, prompt(0))
    flood(driver)
    assert ask(driver, prompt(0)) == 0
    assert ask(driver, PROMPT) == 31


@pytest.mark.parametrize("groups", GROUPS, ids=NAMES)
def test_after_its_time_it_goes_like_others(groups: tuple[KVGroup, ...]) -> None:
    driver = start(groups)
    ask(driver, PROMPT, keep=300)
    driver.now += 299
    flood(driver)
    assert ask(driver, PROMPT) == 31
    driver.now += 2
    flood(driver)
    assert ask(driver, PROMPT) == 0


def test_asking_again_begins_the_time_anew_and_never_shortens_it() -> None:
    driver = start()
    ask(driver, PROMPT, keep=300)
    driver.now += 200
    ask(driver, PROMPT, keep=300)
    driver.now += 200
    ask(driver, PROMPT, keep=5)
    driver.now += 50
    flood(driver)
    assert ask(driver, PROMPT) == 31


def test_at_most_half_of_the_cache_is_kept() -> None:
    """Of four prompts that take all of it the newest two."""
    driver = start()
    for number in range(4):
        ask(driver, prompt(number), keep=300)
    assert core_of(driver).scheduler.kv.pool.num_marked == BLOCKS // 2
    flood(driver)
    assert [ask(driver, prompt(number)) for number in (3, 2, 1, 0)] == [31, 31, 0, 0]


@pytest.mark.parametrize("groups", GROUPS, ids=NAMES)
def test_of_a_prompt_beyond_the_bound_the_beginning_is_kept(groups: tuple[KVGroup, ...]) -> None:
    driver = start(groups)
    long = [200 + n for n in range(100)]
    ask(driver, long, keep=300)
    flood(driver)
    assert ask(driver, long) == BLOCKS // 2 * SIZE


def test_a_tenant_cannot_push_out_what_others_keep() -> None:
    driver = start()
    ask(driver, PROMPT, "a", keep=300)
    for number in range(6):
        ask(driver, prompt(number), "b", keep=3600)
    flood(driver)
    assert ask(driver, PROMPT, "a") == 31
    assert ask(driver, prompt(5), "b") == 31


def test_what_is_kept_gives_way_to_requests_that_run() -> None:
    """And all blocks come back."""
    driver = start()
    for number in range(2):
        ask(driver, prompt(number), keep=300)
    long = [200 + n for n in range(124)]
    assert ask(driver, long) == 0
    pool = core_of(driver).scheduler.kv.pool
    assert (pool.num_free, pool.num_marked) == (BLOCKS, 0)


def test_an_emptied_cache_keeps_nothing() -> None:
    driver = start()
    ask(driver, PROMPT, keep=300)
    kv = core_of(driver).scheduler.kv
    kv.clear_cache()
    kv.check_integrity()
    assert (kv.pool.num_marked, ask(driver, PROMPT)) == (0, 0)


def test_an_engine_that_schedules_by_itself_goes_on_as_before() -> None:
    driver = Driver(SimulatedBatcher(SimulatedBatcherConfig(block_size=SIZE, num_blocks=BLOCKS)))
    ask(driver, PROMPT, keep=300)
    flood(driver)
    assert ask(driver, PROMPT) == 0


def core_of(driver: Driver) -> EngineCore:
    assert isinstance(driver.core, EngineCore)
    return driver.core
