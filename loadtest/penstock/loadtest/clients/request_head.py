"""Heads of requests."""

from __future__ import annotations

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.http1 import ConnectionPool
from penstock.loadtest.errors import LoadTestError

_OURS = frozenset({"connection", "content-length", "expect", "transfer-encoding"})


def head(pool: ConnectionPool, options: ClientOptions, method: str, path: str, **fields: str) -> bytes:
    """Request line and headers, without the empty line. `fields`: headers with _ for -; the options' own go before
    them. Raises LoadTestError for headers that are this client's business."""
    given = {"Host": pool.authority} | {name.replace("_", "-").title(): value for name, value in fields.items()}
    if options.api_key is not None:
        given["Authorization"] = f"Bearer {options.api_key}"
    if not options.keep_alive:
        given["Connection"] = "close"
    for name, value in options.headers.items():
        if name.lower() in _OURS:
            raise LoadTestError(f"header: {name} is set by the client itself")
        given = {known: kept for known, kept in given.items() if known.lower() != name.lower()} | {name: value}
    lines = [f"{method} {pool.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join(lines).encode()
