"""Bounds of what is kept of responses and conversations: how much, and what goes when there is no more room."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

from penstock.gateway.transports.http.settings import AppSettings

OVERHEAD = 2048
"""Bytes that are counted for an entry beside its JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseBounds:
    most: int
    """0: nothing is kept."""
    most_of_tenant: int
    most_bytes: int
    most_bytes_of_tenant: int
    most_bytes_each: int
    """Bounds how long it takes to read a conversation again."""


def bounds_of(settings: AppSettings) -> ResponseBounds:
    most, most_bytes = settings.stored_responses, settings.stored_responses_memory
    of_tenant = settings.stored_responses_memory_per_tenant or most_bytes
    return ResponseBounds(
        most=most,
        most_of_tenant=settings.stored_responses_per_tenant or most,
        most_bytes=most_bytes,
        most_bytes_of_tenant=of_tenant,
        most_bytes_each=min(most_bytes, of_tenant, settings.max_body_bytes),
    )


@dataclass(frozen=True, slots=True)
class Kept:
    """A table with the columns `tenant`, `bytes` and `used`, which grows with each use of an entry."""

    table: str
    forget: Callable[[sqlite3.Connection, str], None]
    """What is done to the entry with this id."""
    counted: str = "1"
    """SQL: the entries that count. The bytes of the others count, too."""
    loose: str = "1"
    """SQL: the entries that may go."""

    def make_room(self, connection: sqlite3.Connection, tenant: str, bounds: ResponseBounds) -> None:
        """The one that was not used for longest goes first: of this tenant, and then of all."""
        self._bound(connection, "tenant = ?", (tenant,), bounds.most_of_tenant, bounds.most_bytes_of_tenant)
        self._bound(connection, "1", (), bounds.most, bounds.most_bytes)

    def _bound(
        self, connection: sqlite3.Connection, whose: str, values: tuple[str, ...], most: int, most_bytes: int
    ) -> None:
        total = f"SELECT coalesce(sum({self.counted}), 0), coalesce(sum(bytes), 0) FROM {self.table} WHERE {whose}"
        oldest = f"SELECT id FROM {self.table} WHERE {whose} AND {self.loose} ORDER BY used LIMIT 1"
        while True:
            count, size = connection.execute(total, values).fetchone()
            if count <= most and size <= most_bytes:
                return
            row = connection.execute(oldest, values).fetchone()
            if row is None:
                return
            self.forget(connection, row[0])
