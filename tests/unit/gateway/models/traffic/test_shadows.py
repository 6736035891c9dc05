"""Shadows: how each ends is counted, and none outlives its rule."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.engines.errors import EngineError, OverloadedError
from penstock.gateway.configuration.traffic_rules import ShadowRule
from penstock.gateway.models.traffic.shadows import Result, Shadows


async def same(ours: str, theirs: str) -> bool:
    return ours == theirs


def answers(text: str) -> Callable[[], Awaitable[str]]:
    async def ask() -> str:
        return text

    return ask


def fails(error: Exception) -> Callable[[], Awaitable[str]]:
    async def ask() -> str:
        raise error

    return ask


async def idle(shadows: Shadows) -> None:
    async with asyncio.timeout(20):
        while shadows.in_flight:
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("ask", "answer", "result"),
    [
        (answers("yes"), "yes", Result.EQUAL),
        (answers("no"), "yes", Result.DIFFERENT),
        (answers("yes"), None, Result.UNCOMPARED),
        (fails(OverloadedError("full")), "yes", Result.DROPPED),
        (fails(TimeoutError()), "yes", Result.DROPPED),
        (fails(EngineError("dead")), "yes", Result.FAILED),
    ],
)
async def test_each_is_counted_by_how_it_ends(
    ask: Callable[[], Awaitable[str]], answer: str | None, result: Result
) -> None:
    shadows = Shadows(ShadowRule("s"))
    context = shadows.context("acme")
    shadow = shadows.begin(context, ask, same)
    assert shadow is not None
    shadow.answered(answer)
    await idle(shadows)
    assert shadows.results == {result: 1}
    assert context.ended
    assert context.background
    assert context.tenant == "acme"


async def test_those_under_way_end_with_their_rule_also_one_that_has_not_begun() -> None:
    shadows = Shadows(ShadowRule("s", max_in_flight=2))
    contexts = [shadows.context("") for _ in range(3)]
    begun = [shadows.begin(contexts[0], answers("yes"), same)]  # waits for the target's answer
    await asyncio.sleep(0)
    begun += [shadows.begin(context, answers("yes"), same) for context in contexts[1:]]
    assert begun[2] is None, "two are in flight"
    shadows.stop()
    await idle(shadows)
    assert shadows.results == {Result.DROPPED: 3}
    assert [context.ended for context in contexts[:2]] == [True, True]
    assert shadows.begin(shadows.context(""), answers("yes"), same) is None
