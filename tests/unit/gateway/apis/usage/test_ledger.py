"""What keys use: counted once, kept, and compared with their budgets."""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.apis.usage.ledger import UsageLedger, UsageLine, usage_of
from penstock.gateway.database import Database
from penstock.gateway.errors import BudgetSpentError
from penstock.gateway.models.language.generation import Usage
from penstock.gateway.requests.context import Principal, RequestContext
from penstock.gateway.requests.quota import Limits, Quota, TokensUsed
from penstock.gateway.requests.record import Outcome

START = datetime(2026, 1, 30, 23, 0, tzinfo=UTC)


class Clock:
    def __init__(self, now: datetime = START) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now


def ended(model: str, prompt: int, completion: int, *, key: str = "k", outcome: Outcome = Outcome.OK) -> RequestContext:
    context = RequestContext(principal=Principal(tenant="t", key=key))
    context.record.model, context.record.outcome = model, outcome
    context.record.usage = Usage(prompt_tokens=prompt, completion_tokens=completion)
    return context


async def totals(ledger: UsageLedger, *by: str) -> list[UsageLine]:
    return (await ledger.lines(by, date(2026, 1, 1), date(2026, 12, 31), {}, 100))[0]


def test_a_request_whose_work_another_one_does_is_not_counted_beside_it() -> None:
    """A stream that can be resumed, or a response that is made in the background, is one request to its key."""
    asked = ended("m", 10, 0)
    worker = asked.next_request()
    asked.hand_over_to(worker)
    worker.record.usage = Usage(prompt_tokens=10, completion_tokens=5)
    assert usage_of(asked) is None
    found = usage_of(worker)
    assert found is not None
    assert (found.model, found.prompt_tokens, found.completion_tokens) == ("m", 10, 5)
    later = asked.next_request()
    later.record.model = "m"
    assert usage_of(later) is not None, "of the same caller"


async def test_what_was_used_is_there_after_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    for prompt in (10, 20):
        database = Database(tmp_path / "db")
        ledger = UsageLedger(database, clock)
        ledger(ended("m", prompt, 1))
        ledger(ended("other", 5, 0, key=""))
        ledger(ended("m", 1, 1, outcome=Outcome.CANCELLED))
        ledger(ended("m", 7, 7, outcome=Outcome.REFUSED))
        ledger(ended("m", 7, 7, outcome=Outcome.LIMITED))
        ledger(ended("", 7, 7))
        ledger.write()
        database.close()
    database = Database(tmp_path / "db")
    ledger = UsageLedger(database, clock)
    assert await totals(ledger, "model") == [
        UsageLine(6, 4, 32, 4, 0, model="m"),
        UsageLine(2, 0, 10, 0, 0, model="other"),
    ]
    assert await totals(ledger) == [UsageLine(8, 4, 42, 4, 0)]
    assert (ledger.used("k").today, ledger.used("k").this_month) == (36, 36)
    clock.now += timedelta(days=500)
    assert await totals(UsageLedger(database, clock)) == []
    database.close()


async def test_lines_are_bounded_and_chosen() -> None:
    database = Database(None)
    ledger = UsageLedger(database, Clock())
    for number in range(5):
        ledger(ended(f"m{number}", 1, 1))
    lines, more = await ledger.lines(["model"], date(2026, 1, 1), date(2026, 1, 31), {}, 3)
    assert ([line.model for line in lines], more) == (["m0", "m1", "m2"], True)
    only = {"model": "m4", "tenant": "t' OR 1=1"}
    assert await ledger.lines(["day"], date(2026, 1, 1), date(2026, 1, 31), only, 3) == ([], False)
    database.close()


async def test_what_the_database_refuses_is_tried_again() -> None:
    database = Database(None)
    ledger = UsageLedger(database, Clock())
    await database.run(lambda connection: connection.execute("ALTER TABLE usage RENAME TO gone") and None)
    ledger(ended("m", 3, 4))
    ledger.write()
    while not ledger._new:
        await asyncio.sleep(0)
    await database.run(lambda connection: connection.execute("ALTER TABLE gone RENAME TO usage") and None)
    assert await totals(ledger) == [UsageLine(1, 0, 3, 4, 0)]
    database.close()


def test_a_budget_ends_with_its_period() -> None:
    clock = Clock()
    used = TokensUsed(clock)
    quota = Quota(Limits(tokens_per_day=100, tokens_per_month=150))
    quota.used = used
    used.add(99)
    quota.begin()
    used.add(1)
    with pytest.raises(BudgetSpentError, match="100 tokens per day") as caught:
        quota.begin()
    assert caught.value.retry_after == 3600
    clock.now += timedelta(hours=1)
    quota.begin()
    used.add(60)
    with pytest.raises(
        BudgetSpentError, match=r"150 tokens per month \(UTC\), and they are used up until 2026-02-01"
    ) as caught:
        quota.begin()
    assert caught.value.retry_after == 24 * 3600
    clock.now += timedelta(days=1)
    quota.begin()
    assert (used.today, used.this_month) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 1000)), max_size=30))
def test_days_and_months_are_those_of_the_calendar(story: list[tuple[int, int]]) -> None:
    clock = Clock()
    used = TokensUsed(clock)
    told: list[tuple[date, int]] = []
    for days, tokens in story:
        clock.now += timedelta(days=days)
        used.add(tokens)
        told.append((clock.now.date(), tokens))
        today = clock.now.date()
        assert used.today == sum(tokens for day, tokens in told if day == today)
        assert used.this_month == sum(
            tokens for day, tokens in told if (day.year, day.month) == (today.year, today.month)
        )
    again = TokensUsed(clock)
    for day, tokens in told:
        again.had(day, tokens)
    assert (again.today, again.this_month) == (used.today, used.this_month)
