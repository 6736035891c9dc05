"""What is taken in before any queue: bytes of bodies, work for threads, requests while the loop keeps up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.errors import CancelledError, OverloadedError
from penstock.gateway.metrics.request_metrics import IntakeMetrics
from penstock.gateway.requests.call import RequestJournal
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.intake import SMALL_BODY, BodyBudget, BodyIntake, LoopLag, WorkPool, WorkPools

MIB = 1 << 20


@given(st.lists(st.integers(1, 40)))
def test_never_more_than_the_limit_and_all_of_it_again(sizes: list[int]) -> None:
    budget, held = BodyBudget(100), []
    for size in sizes:
        if sum(held) + size <= 100:
            budget.take(size)
            held.append(size)
        else:
            with pytest.raises(OverloadedError):
                budget.take(size)
        assert budget.held == sum(held) <= 100
    for size in held:
        budget.give_back(size)
    assert budget.held == 0


def test_what_is_announced_is_refused_before_it_is_read() -> None:
    budget = BodyBudget(10 * MIB)
    budget.take(8 * MIB)
    budget.check(2 * MIB)
    with pytest.raises(OverloadedError, match="8388608 bytes of request bodies") as refused:
        budget.check(3 * MIB)
    assert refused.value.retry_after == 1
    budget.check(SMALL_BODY)
    assert (budget.held, budget.refused) == (8 * MIB, 1)


def test_memory_goes_back_when_much_was_held_and_nothing_is() -> None:
    calls: list[int] = []
    budget = BodyBudget(1 << 30, lambda: calls.append(1))
    budget.take(MIB)
    budget.give_back(MIB)
    assert not calls
    for _ in range(2):
        for _ in range(2):
            budget.take(100 * MIB)
        budget.give_back(100 * MIB)
    assert not calls
    budget.give_back(200 * MIB)
    assert calls == [1]


def test_a_request_holds_its_body_until_its_end() -> None:
    budget, journal, context = BodyBudget(100), RequestJournal(), RequestContext()
    journal.begin(context)
    context.hold_body(budget, 60)
    following = context.next_request()
    journal.begin(following)
    with pytest.raises(OverloadedError):
        following.hold_body(budget, 60)
    following.hold_body(budget, 30)
    for ended, left in ((context, 30), (context, 30), (following, 0)):
        journal.end(ended)
        assert budget.held == left


def test_a_thread_that_outlasts_its_request_holds_nothing() -> None:
    """The client of a compressed body has left while it was decompressed."""
    budget, journal, context = BodyBudget(100), RequestJournal(), RequestContext()
    journal.begin(context)
    context.hold_body(budget, 40)
    context.hold_more(20)
    assert budget.held == 60
    journal.end(context)
    holds: tuple[Callable[[int], None], ...] = (partial(context.hold_body, budget), context.hold_more)
    for hold in holds:
        with pytest.raises(CancelledError):
            hold(30)
        assert budget.held == 0
    context.next_request().hold_body(budget, 100)


def test_a_late_loop_refuses_until_it_has_caught_up() -> None:
    lag = LoopLag(1.0)
    lag.note(1.5)
    lag.check()  # once: the process may have stood still
    lag.note(0.9)
    lag.check()
    for _ in range(2):
        lag.note(1.5)
    with pytest.raises(OverloadedError, match="too busy"):
        lag.check()
    lag.note(0.0)
    lag.check()
    assert lag.refused == 1
    never = LoopLag(0.0)
    for _ in range(2):
        never.note(100)
    never.check()


async def test_the_lag_is_measured() -> None:
    lag = LoopLag(0)
    lag.start()
    await asyncio.sleep(0)
    threading.Event().wait(0.4)  # holds the loop up, which is the point
    while not lag.recent:
        await asyncio.sleep(0.01)
    lag.stop()
    assert lag.recent >= 0.2


async def test_a_pool_refuses_what_would_wait_too_long() -> None:
    pool, go = WorkPool("text", 100), threading.Event()
    alone = asyncio.create_task(pool.run(500, go.wait))  # larger than everything, and nothing else is there
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="Too much text"):
        await pool.run(1, int)
    go.set()
    assert await alone
    assert await pool.run(100, int, "7") == 7
    assert (pool.cost, pool.refused) == (0, 1)


async def test_work_that_nobody_waits_for_is_not_begun() -> None:
    pool, go, done = WorkPool("text", 1000), threading.Event(), list[int]()
    running = [asyncio.create_task(pool.run(1, go.wait)) for _ in range(pool._threads._max_workers)]
    waiting = [asyncio.create_task(pool.run(1, done.append, number)) for number in range(5)]
    await asyncio.sleep(0)
    for task in waiting[:4]:
        task.cancel()
    await asyncio.gather(*waiting[:4], return_exceptions=True)
    await asyncio.sleep(0)  # the threads' side is told one turn later
    go.set()
    await asyncio.gather(*running, *waiting, return_exceptions=True)
    assert done == [4]
    assert pool.cost == 0


def test_metrics_show_what_is_held_refused_and_worked_on() -> None:
    intake, pools = BodyIntake(body_bytes=100), WorkPools()
    intake.bodies.take(60)
    with pytest.raises(OverloadedError):
        intake.bodies.take(60)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in IntakeMetrics(intake, pools).collect()
        for sample in family.samples
    }
    assert found["penstock_body_bytes",] == 60
    assert found["penstock_front_refused_total", "bodies"] == 1
    assert found["penstock_work", "text"] == 0
