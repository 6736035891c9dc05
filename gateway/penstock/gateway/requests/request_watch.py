"""The watch over the requests of a process, for operators: those in flight and, while a console is open, those that
have ended. Never texts."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from penstock.engines.errors import CancelledError
from penstock.gateway.requests.call import DrainState, RequestJournal
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.record import Outcome, Stage

_PATIENCE = 5.0
"""Seconds without a look after which nothing is noted any more."""
_MOST_ENDED = 300
_MOST_TENANTS = 100
_MOST_DETAILED = 128
_OWN_ROUTES = "/console"
"""Requests of the console itself are not shown."""


class RequestRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request in flight."""

    id: str
    tenant: str
    protocol: str
    route: str
    model: str
    stage: str
    stage_seconds: float
    seconds: float
    deadline_in_seconds: float | None
    bytes_in: int
    target: str = ""
    prompt_tokens: int | UnsetType = UNSET
    completion_tokens: int | UnsetType = UNSET
    ttft_seconds: float | UnsetType | None = UNSET
    """None: there is no token yet."""


class EndedRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    id: str
    tenant: str
    route: str
    model: str
    ended_at: float
    """Of time.monotonic()."""
    seconds: float
    outcome: str
    status: str
    target: str = ""
    reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    ttft_seconds: float | None = None
    itl_seconds: float | None = None
    """Between two tokens, on average."""


class RequestDetail(msgspec.Struct, kw_only=True):
    """The times of one request, in seconds since its first byte."""

    id: str
    tenant: str
    model: str
    target: str
    route: str
    seconds: float
    ended: bool
    outcome: str
    reason: str
    status: str
    stage: str
    stages: list[tuple[str, float]]
    """Each with its beginning; empty: nobody looked when it came."""
    chunks: list[tuple[float, float, int]]
    """What steps have computed of its prompt: beginning, end, tokens."""
    calls: list[tuple[str, float, float]]
    """Models that models have called for it."""
    queue_seconds: float
    ttft_seconds: float | None
    write_seconds: float
    """In which it waited for a client that read slowly."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    bytes_in: int
    bytes_out: int
    deadline_in_seconds: float | None
    ignored: tuple[str, ...]
    finish_reasons: tuple[str, ...]


class TenantRow(msgspec.Struct):
    """Of a tenant's requests: those in flight, and those that have ended since a console was opened."""

    in_flight: int = 0
    queued: int = 0
    """That have no token yet."""
    prompt_tokens: int = 0
    """Of those in flight."""
    begun: int = 0
    ended: int = 0
    refused: int = 0
    """Of those that have ended: limited or refused."""
    tokens: int = 0
    """Of those that have ended: prompts and answers."""


class RequestChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that an operator looks at."""

    limit: int
    """Of those in flight."""
    tenant: str | None = None
    model: str | None = None
    """None: of all."""
    since: float | None = None
    """Of time.monotonic(): those that have ended after that, too, from the first such look on; None: those in flight
    alone."""
    request: str = ""
    """The id of the one whose details are shown."""


class WatchedRequests(msgspec.Struct):
    in_flight: int
    chosen: int
    """Of those in flight."""
    requests: list[RequestRow]
    """The oldest first."""
    tenants: dict[str, TenantRow]
    """Those with most requests in flight."""
    ended: list[EndedRow]
    detail: RequestDetail | None = None


class RequestWatch:
    """Of one process. Costs nothing until a look asks for those that have ended: then it is told of each request's
    beginning and end for some seconds. Lives on the event loop."""

    def __init__(self, journal: RequestJournal, drain: DrainState) -> None:
        self._journal = journal
        self._drain = drain
        self._looked_at = 0.0
        self._stop: Callable[[], None] | None = None
        self._ended: deque[EndedRow] = deque(maxlen=_MOST_ENDED)
        self._details: deque[RequestDetail] = deque(maxlen=_MOST_DETAILED)
        self._tenants: dict[str, TenantRow] = {}

    def look(self, choice: RequestChoice, looker: RequestContext | None = None) -> WatchedRequests:
        """`looker`: the request that looks, which is not shown."""
        now, since = time.monotonic(), choice.since
        live = [context for context in self._journal.in_flight() if context is not looker]
        if since is not None:
            self._keep_watching(now)
            live = [context for context in live if not _is_own(context)]
        chosen = [context for context in live if _matches(context, choice)]
        return WatchedRequests(
            len(live),
            len(chosen),
            [_request_row(context, now) for context in chosen[: choice.limit]],
            {} if since is None else self._by_tenant(live),
            [] if since is None else [row for row in self._ended if row.ended_at > since],
            self._detail(choice.request, live, now) if choice.request else None,
        )

    def _keep_watching(self, now: float) -> None:
        self._looked_at = now
        if self._stop is None:
            self._stop = self._journal.watch(self._begin, self._end)
            asyncio.get_running_loop().call_later(_PATIENCE, self._look_again)

    def cancel(self, request: str) -> bool:
        """Ends a request that is in flight here. False: there is none with this id."""
        error = CancelledError("The request was cancelled by an operator of the server.")
        contexts = [context for context in self._journal.in_flight() if context.id == request]
        ended = [self._drain.cancel(context.record, error) for context in contexts]  # clients may have used an id twice
        return any(ended)

    def _look_again(self) -> None:
        left = self._looked_at + _PATIENCE - time.monotonic()
        if left > 0:
            asyncio.get_running_loop().call_later(left, self._look_again)
        elif self._stop is not None:
            self._stop()
            self._stop = None
            self._ended.clear()
            self._details.clear()
            self._tenants.clear()

    def _begin(self, context: RequestContext) -> None:
        if context.record.stages is None:
            context.record.stages = [(Stage.READING, context.arrival)]

    def _end(self, context: RequestContext) -> None:
        if _is_own(context) or not context.infers:
            return
        now, record = time.monotonic(), context.record
        self._ended.append(_ended_row(context, now))
        self._details.append(_detail(context, now, ended=True))
        row = self._tenants.setdefault(context.tenant, TenantRow()) if self._has_room(context.tenant) else TenantRow()
        row.begun += 1
        row.ended += 1
        row.refused += record.outcome in (Outcome.LIMITED, Outcome.REFUSED)
        if record.usage is not None:
            row.tokens += record.usage.prompt_tokens + record.usage.completion_tokens

    def _has_room(self, tenant: str) -> bool:
        return tenant in self._tenants or len(self._tenants) < _MOST_TENANTS

    def _by_tenant(self, live: Sequence[RequestContext]) -> dict[str, TenantRow]:
        rows = {tenant: msgspec.structs.replace(row) for tenant, row in self._tenants.items()}
        for context in live:
            record = context.record
            row = rows.setdefault(context.tenant, TenantRow())
            row.in_flight += 1
            row.begun += 1
            row.queued += record.first_token_at is None
            row.prompt_tokens += 0 if record.usage is None else record.usage.prompt_tokens
        return _busiest(rows)

    def _detail(self, request: str, live: Sequence[RequestContext], now: float) -> RequestDetail | None:
        context = next((context for context in live if context.id == request), None)
        if context is not None:
            return _detail(context, now, ended=False)
        return next((detail for detail in reversed(self._details) if detail.id == request), None)


class FrontRequests(Protocol):
    """The requests in front processes."""

    async def watch_requests(self, choice: RequestChoice) -> list[WatchedRequests]:
        """Of each front that answers."""
        ...

    async def cancel_request(self, request: str) -> bool:
        """Whether a front had it."""
        ...


class ServerRequests:
    """The requests in all processes of a server."""

    def __init__(self, watch: RequestWatch, fronts: FrontRequests | None = None) -> None:
        self._watch = watch
        self._fronts = fronts

    @property
    def has_fronts(self) -> bool:
        """Whether front processes have some of them."""
        return self._fronts is not None

    async def look(self, choice: RequestChoice, looker: RequestContext | None = None) -> WatchedRequests:
        """`looker`: as RequestWatch has it."""
        parts = [self._watch.look(choice, looker)]
        if self._fronts is not None:
            parts += await self._fronts.watch_requests(choice)
        return _merged(parts, choice.limit)

    async def cancel(self, request: str) -> bool:
        """False: there is none with this id."""
        if self._watch.cancel(request):
            return True
        return self._fronts is not None and await self._fronts.cancel_request(request)


def _merged(parts: Sequence[WatchedRequests], limit: int) -> WatchedRequests:
    """Of several processes."""
    if len(parts) == 1:
        return parts[0]
    tenants: dict[str, TenantRow] = {}
    for part in parts:
        for tenant, row in part.tenants.items():
            total = tenants.setdefault(tenant, TenantRow())
            for name in TenantRow.__struct_fields__:
                setattr(total, name, getattr(total, name) + getattr(row, name))
    requests = sorted((row for part in parts for row in part.requests), key=lambda row: -row.seconds)
    return WatchedRequests(
        sum(part.in_flight for part in parts),
        sum(part.chosen for part in parts),
        requests[:limit],
        _busiest(tenants),
        sorted((row for part in parts for row in part.ended), key=lambda row: row.ended_at)[-_MOST_ENDED:],
        next((part.detail for part in parts if part.detail is not None), None),
    )


def _busiest(tenants: Mapping[str, TenantRow]) -> dict[str, TenantRow]:
    order = sorted(tenants.items(), key=lambda entry: (-entry[1].in_flight, -entry[1].begun))
    return dict(order[:_MOST_TENANTS])


def _request_row(context: RequestContext, now: float) -> RequestRow:
    record, usage = context.record, context.record.usage
    row = RequestRow(
        id=context.id,
        tenant=context.tenant,
        protocol=record.protocol,
        route=record.route,
        model=record.model,
        stage=record.stage.value,
        stage_seconds=round(now - record.stage_since, 3),
        seconds=round(now - context.arrival, 3),
        deadline_in_seconds=None if context.deadline is None else round(context.deadline - now, 3),
        bytes_in=record.bytes_in,
        target=record.target,
    )
    if usage is not None:
        row.prompt_tokens = usage.prompt_tokens
        row.completion_tokens = usage.completion_tokens
        row.ttft_seconds = _ttft(context)
    return row


def _ended_row(context: RequestContext, now: float) -> EndedRow:
    record, usage = context.record, context.record.usage
    row = EndedRow(
        id=context.id,
        tenant=context.tenant,
        route=record.route,
        model=record.model,
        ended_at=now,
        seconds=round(now - context.arrival, 4),
        outcome=record.outcome.value,
        status=record.status,
        target=record.target,
        reason=record.reason,
        queue_seconds=round(record.queue_seconds, 4),
    )
    if usage is not None:
        row.prompt_tokens, row.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        row.cached_tokens = usage.cached_tokens
        row.ttft_seconds = _ttft(context)
        if record.first_token_at is not None and usage.completion_tokens > 1:
            row.itl_seconds = round((now - record.first_token_at) / (usage.completion_tokens - 1), 6)
    return row


def _ttft(context: RequestContext) -> float | None:
    first = context.record.first_token_at
    return None if first is None else round(first - context.arrival, 3)


def _detail(context: RequestContext, now: float, *, ended: bool) -> RequestDetail:
    record, begin = context.record, context.arrival
    usage = record.usage
    return RequestDetail(
        id=context.id,
        tenant=context.tenant,
        model=record.model,
        target=record.target,
        route=record.route,
        seconds=now - begin,
        ended=ended,
        outcome=record.outcome.value if ended else "",
        reason=record.reason,
        status=record.status,
        stage=record.stage.value,
        stages=[(stage.value, at - begin) for stage, at in (record.stages or ())[:_MOST_DETAILED]],
        chunks=[(start - begin, end - begin, tokens) for start, end, tokens in record.prompt_chunks],
        calls=[(name, start - begin, end - begin) for name, start, end in record.calls],
        queue_seconds=record.queue_seconds,
        ttft_seconds=None if record.first_token_at is None else record.first_token_at - begin,
        write_seconds=record.write_seconds,
        prompt_tokens=0 if usage is None else usage.prompt_tokens,
        completion_tokens=0 if usage is None else usage.completion_tokens,
        cached_tokens=0 if usage is None else usage.cached_tokens,
        bytes_in=record.bytes_in,
        bytes_out=record.bytes_out,
        deadline_in_seconds=None if context.deadline is None else context.deadline - now,
        ignored=record.ignored,
        finish_reasons=record.finish_reasons,
    )


def _matches(context: RequestContext, choice: RequestChoice) -> bool:
    return choice.tenant in (None, context.tenant) and choice.model in (None, context.record.model)


def _is_own(context: RequestContext) -> bool:
    return context.record.route.startswith(_OWN_ROUTES)
