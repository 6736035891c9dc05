"""The quota of a key: requests and tokens in a minute, tokens in a day and a month, and requests at one time.

Both accounts fill evenly, up to what a minute allows. A request is let in while something is left. Its prompt and the
tokens that it asks for are taken off at once, which may leave less than nothing, and what it did not use is given back
at its end. So no request is too large for ever, and none is let in before an earlier one has been paid for.

Budgets of a day and a month are counted by requests that have ended (`TokensUsed`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from penstock.engines.errors import RateLimitedError
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
        seconds = (datetime.combine(until, datetime.min.time(), UTC) - self._now()).total_seconds()
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


Clock = Callable[[], float]
_MINUTE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None


class Account:
    """Fills at `per_minute`, up to `per_minute`."""

    __slots__ = ("_clock", "_left", "_since", "per_minute")

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._left = float(per_minute)
        self._since = clock()

    @property
    def left(self) -> float:
        """Below 0: spent in advance."""
        now = self._clock()
        self._left = min(self.per_minute, self._left + (now - self._since) * self.per_minute / _MINUTE)
        self._since = now
        return self._left

    def spend(self, amount: float) -> None:
        """A negative amount is given back."""
        self._left = min(self.per_minute, self.left - amount)

    def seconds_until(self, amount: float) -> float:
        """Until so much is left, when nothing more is spent."""
        return max(0.0, amount - self.left) * _MINUTE / self.per_minute


class Quota:
    """Of one key. Lives on the event loop."""

    def __init__(self, limits: Limits, clock: Clock = time.monotonic) -> None:
        self.limits = limits
        self.in_flight = 0
        self.used = TokensUsed()
        """What budgets of days and months are compared with: the tokens of requests that have ended."""
        self._accounts = {
            name: Account(per_minute, clock)
            for name, per_minute in (("requests", limits.requests_per_minute), ("tokens", limits.tokens_per_minute))
            if per_minute is not None
        }

    def begin(self, *, place: bool = True) -> None:
        """Lets a request in, which has to `end`; without a `place` among those at one time it has not. Raises
        RateLimitedError."""
        self.used.check(self.limits.tokens_per_day, self.limits.tokens_per_month)
        most = self.limits.concurrent_requests
        if place and most is not None and self.in_flight >= most:
            raise RateLimitedError(f"This key allows at most {most} requests at one time.", retry_after=1)
        for name, account in self._accounts.items():
            if account.left < 1:
                raise RateLimitedError(
                    f"This key allows {account.per_minute} {name} per minute, and they are used up.",
                    retry_after=account.seconds_until(1),
                )
        self._spend("requests", 1)
        self.in_flight += place

    def spend_tokens(self, count: int) -> None:
        """A negative count is given back."""
        self._spend("tokens", count)

    def end(self) -> None:
        self.in_flight -= 1

    def _spend(self, name: str, amount: int) -> None:
        account = self._accounts.get(name)
        if account is not None:
            account.spend(amount)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """`x-ratelimit-*`, as of OpenAI: limit, remaining, and the time until all of it is there again."""
        headers = []
        for name, account in self._accounts.items():
            kind = name.encode()
            remaining = max(0, math.floor(account.left))
            headers += [
                (b"x-ratelimit-limit-" + kind, b"%d" % account.per_minute),
                (b"x-ratelimit-remaining-" + kind, b"%d" % remaining),
                (b"x-ratelimit-reset-" + kind, _duration(account.seconds_until(account.per_minute)).encode()),
            ]
        return headers


def _duration(seconds: float) -> str:
    """As Go writes it, which is what clients of OpenAI's parse: 6m0s, 1.25s, 20ms."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 100) / 100, 60)
    return (f"{minutes:.0f}m" if minutes else "") + f"{rest:.2f}".rstrip("0").rstrip(".") + "s"
