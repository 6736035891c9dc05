"""Tokens and requests by day, key and model: added up in memory, and in the database a second later."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, timedelta

import msgspec

from penstock.gateway.database import Database
from penstock.gateway.requests.context import Principal, RequestContext
from penstock.gateway.requests.quota import Now, TokensUsed, utc_now
from penstock.gateway.requests.record import Outcome

_SCHEMA = """
CREATE TABLE IF NOT EXISTS usage (
    day TEXT NOT NULL, key TEXT NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL,
    requests INTEGER NOT NULL, failed INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    PRIMARY KEY (day, key, tenant, model)
) WITHOUT ROWID;
"""
_ADD = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET requests = requests + excluded.requests, failed = failed + excluded.failed,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    completion_tokens = completion_tokens + excluded.completion_tokens,
    cached_tokens = cached_tokens + excluded.cached_tokens
"""
_WRITE_SECONDS = 1.0
_KEPT_DAYS = 400
_NOT_COUNTED = frozenset({Outcome.DENIED, Outcome.LIMITED})
_OK, _REFUSED = Outcome.OK, Outcome.REFUSED

_Row = tuple[str, str, str, str]
"""Day, key, tenant, model."""


@dataclass(slots=True)
class _Sums:
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class RequestUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What one request has used."""

    key: str
    tenant: str
    model: str
    failed: bool
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


def usage_of(context: RequestContext) -> RequestUsage | None:
    """Of a request that has ended; None: it is not counted."""
    record, principal = context.record, context.principal
    if not record.model or record.outcome in _NOT_COUNTED or context.is_handed_over:
        return None
    if context.background and record.outcome is _REFUSED:
        return None  # a batch asks again
    usage = None if record.outcome is _REFUSED else record.usage
    return RequestUsage(
        key=principal.key,
        tenant=principal.tenant,
        model=record.model,
        failed=record.outcome is not _OK,
        prompt_tokens=usage.prompt_tokens if usage is not None else 0,
        completion_tokens=usage.completion_tokens if usage is not None else 0,
        cached_tokens=usage.cached_tokens if usage is not None else 0,
    )


class UsageLine(msgspec.Struct, omit_defaults=True):
    """A sum over all that has these; what is None was not asked for."""

    requests: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    day: str | None = None
    tenant: str | None = None
    key: str | None = None
    model: str | None = None


COLUMNS = ("day", "tenant", "key", "model")


class UsageLedger:
    """Told of each request that has ended. Lives on the event loop."""

    def __init__(self, database: Database, now: Now = utc_now) -> None:
        """Before any other work is asked of the database. Raises sqlite3.Error."""
        database.create(_SCHEMA)
        self._database = database
        self._now = now
        self._new: dict[_Row, _Sums] = {}
        """Not in the database yet."""
        self._timer: asyncio.TimerHandle | None = None
        self._used: dict[str, TokensUsed] = {}
        """By key."""
        self._today = today = now().date()
        self._written = today.isoformat()
        """As rows have it."""
        for key, day, tokens in database.prepare(lambda connection: _opened(connection, today)):
            self.used(key).had(date.fromisoformat(day), tokens)

    def used(self, key: str) -> TokensUsed:
        """What a key's budget is compared with."""
        used = self._used.get(key)
        if used is None:
            used = self._used[key] = TokensUsed(self._now)
        return used

    def watch(self, principals: Iterable[Principal]) -> None:
        """From now on these keys' budgets are compared with what this has counted."""
        for principal in principals:
            if principal.quota is not None:
                principal.quota.used = self.used(principal.key)

    def __call__(self, context: RequestContext) -> None:
        usage = usage_of(context)
        if usage is not None:
            self.add(usage)

    def add(self, usage: RequestUsage) -> None:
        today = self._now().date()
        if today != self._today:
            self._today, self._written = today, today.isoformat()
        row = (self._written, usage.key, usage.tenant, usage.model)
        sums = self._new.get(row)
        if sums is None:
            sums = self._new[row] = _Sums()
            self._write_soon()
        sums.requests += 1
        sums.failed += usage.failed
        sums.prompt_tokens += usage.prompt_tokens
        sums.completion_tokens += usage.completion_tokens
        sums.cached_tokens += usage.cached_tokens
        if usage.prompt_tokens or usage.completion_tokens:
            self.used(usage.key).add(usage.prompt_tokens + usage.completion_tokens)

    def _write_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_WRITE_SECONDS, self.write)

    def write(self) -> None:
        """Asks the database to keep what is new. At the server's end too, before the database is closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._new:
            return
        new, self._new = self._new, {}
        rows: list[tuple[str | int, ...]] = [row + _numbers(sums) for row, sums in new.items()]
        loop = asyncio.get_running_loop()

        def written(future: Future[None]) -> None:
            if future.exception() is not None:
                with suppress(RuntimeError):  # the server has ended
                    loop.call_soon_threadsafe(self._take_back, new)

        future = self._database.submit(lambda connection: _add(connection, rows), "usage is not written yet")
        future.add_done_callback(written)

    def _take_back(self, unwritten: dict[_Row, _Sums]) -> None:
        """The database could not take these: they are tried again with what has come since."""
        for row, sums in unwritten.items():
            known = self._new.setdefault(row, _Sums())
            for name in _Sums.__slots__:
                setattr(known, name, getattr(known, name) + getattr(sums, name))
        self._write_soon()

    async def lines(
        self, by: Sequence[str], start: date, end: date, only: dict[str, str], most: int
    ) -> tuple[list[UsageLine], bool]:
        """Sums by some of COLUMNS, over the days from `start` to `end` and the rows that have what `only` says; and
        whether there are more than that."""
        self.write()
        query, values = _query(by, start, end, only, most + 1)
        rows = await self._database.run(lambda connection: connection.execute(query, values).fetchall())
        page = [UsageLine(*row[:5], **dict(zip(by, row[5:], strict=True))) for row in rows[:most]]
        return page, len(rows) > most


def _numbers(sums: _Sums) -> tuple[int, ...]:
    return (sums.requests, sums.failed, sums.prompt_tokens, sums.completion_tokens, sums.cached_tokens)


def _add(connection: sqlite3.Connection, rows: list[tuple[str | int, ...]]) -> None:
    connection.executemany(_ADD, rows)


def _opened(connection: sqlite3.Connection, today: date) -> list[tuple[str, str, int]]:
    """Forgets what is very old; gives this month's tokens by key and day."""
    oldest = today - timedelta(days=_KEPT_DAYS)
    connection.execute("DELETE FROM usage WHERE day < ?", (oldest.isoformat(),))
    query = "SELECT key, day, sum(prompt_tokens + completion_tokens) FROM usage WHERE day >= ? GROUP BY key, day"
    return connection.execute(query, (today.replace(day=1).isoformat(),)).fetchall()


def _query(by: Sequence[str], start: date, end: date, only: dict[str, str], most: int) -> tuple[str, list[str | int]]:
    """Names of columns are among COLUMNS; everything of a client's is a parameter."""
    names = [name for name in COLUMNS if name in by]
    sums = "sum(requests), sum(failed), sum(prompt_tokens), sum(completion_tokens), sum(cached_tokens)"
    where = "".join(f" AND {name} = ?" for name in COLUMNS if name in only)
    group = f" GROUP BY {', '.join(names)} ORDER BY {', '.join(names)}" if names else " GROUP BY NULL"
    query = f"SELECT {', '.join([sums, *names])} FROM usage WHERE day BETWEEN ? AND ?{where}{group} LIMIT ?"
    values: list[str | int] = [
        start.isoformat(),
        end.isoformat(),
        *(only[name] for name in COLUMNS if name in only),
        most,
    ]
    return query, values
