"""How many tokens a key has had today and this month, and whether that is all it gets. Days and months are UTC's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta

from penstock.gateway.errors import BudgetSpentError

Now = Callable[[], datetime]


def utc_now() -> datetime:
    return datetime.now(UTC)


class TokensUsed:
    """Of one key. Plain data."""

    def __init__(self, now: Now = utc_now) -> None:
        self._now = now
        self._date = now().date()
        self._today = 0
        self._this_month = 0

    def add(self, tokens: int) -> None:
        self._turn()
        self._today += tokens
        self._this_month += tokens

    def had(self, day: date, tokens: int) -> None:
        """What is known of an earlier time."""
        self._turn()
        if (day.year, day.month) == (self._date.year, self._date.month):
            self._this_month += tokens
            self._today += tokens if day == self._date else 0

    @property
    def today(self) -> int:
        self._turn()
        return self._today

    @property
    def this_month(self) -> int:
        self._turn()
        return self._this_month

    def check(self, per_day: int | None, per_month: int | None) -> None:
        """None: no limit. Raises BudgetSpentError where nothing is left of one."""
        if per_month is not None and self.this_month >= per_month:
            first = (self._date.replace(day=1) + timedelta(days=32)).replace(day=1)
            raise self._spent(per_month, "month", first)
        if per_day is not None and self.today >= per_day:
            raise self._spent(per_day, "day", self._date + timedelta(days=1))

    def _spent(self, tokens: int, period: str, until: date) -> BudgetSpentError:
        seconds = (datetime.combine(until, time(), UTC) - self._now()).total_seconds()
        return BudgetSpentError(
            f"This key gets {tokens} tokens per {period} (UTC), and they are used up until {until}.",
            retry_after=max(1.0, seconds),
        )

    def _turn(self) -> None:
        today = self._now().date()
        if today == self._date:
            return
        self._today = 0
        if (today.year, today.month) != (self._date.year, self._date.month):
            self._this_month = 0
        self._date = today
