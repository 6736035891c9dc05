"""The keys of fronts and their quotas, counted by the supervisor for all fronts: a front asks before a request
begins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import count

from penstock.engines.errors import NotReadyError, RateLimitedError
from penstock.gateway.processes.fronts.messages import Ask, Ended, Granted, GrantedKey, Keys, Spent
from penstock.gateway.requests.context import Principal, RequestContext
from penstock.gateway.requests.quota import Limits, Quota

_Tell = Callable[[Ask | Spent | Ended], None]
_RETRY_AFTER = 1.0


class QuotaDesk:
    """The supervisor's side of one front: what its requests count against."""

    def __init__(self, quota_of: Callable[[bytes], Quota | None]) -> None:
        """`quota_of` gives the quota of a key by its digest; None: it has no limits, or the key has gone."""
        self._quota_of = quota_of
        self._begun: dict[int, Quota] = {}
        """By request."""

    def ask(self, request: Ask) -> Granted:
        quota = self._quota_of(request.digest)
        if quota is None:
            return Granted(id=request.id, refusal=None, retry_after=0, headers=[])
        try:
            quota.begin()
        except RateLimitedError as error:
            after = error.retry_after or 0
            return Granted(id=request.id, refusal=error.message, retry_after=after, headers=quota.headers())
        self._begun[request.id] = quota
        return Granted(id=request.id, refusal=None, retry_after=0, headers=quota.headers())

    def spent(self, message: Spent) -> None:
        if message.id in self._begun:
            self._begun[message.id].spend_tokens(message.tokens)

    def ended(self, message: Ended) -> None:
        quota = self._begun.pop(message.id, None)
        if quota is not None:
            quota.end()

    def close(self) -> None:
        """The front is gone: none of its requests runs any more. What was paid for them in advance is spent."""
        for quota in self._begun.values():
            quota.end()
        self._begun.clear()


class QuotaClient:
    """A front's side: asks for each request of a key that has limits."""

    def __init__(self, tell: _Tell) -> None:
        self._tell = tell
        self._numbers = count(1)
        self._waiting: dict[int, tuple[DistantQuota, asyncio.Future[Granted]]] = {}

    async def count(self, context: RequestContext) -> None:
        """As `RequestContext.count`. Raises RateLimitedError."""
        context.infers = True
        quota = context.principal.quota
        if not isinstance(quota, DistantQuota):
            context.count()
            return
        number = next(self._numbers)
        answer: asyncio.Future[Granted] = asyncio.get_running_loop().create_future()
        self._waiting[number] = quota, answer
        self._tell(Ask(id=number, digest=quota.digest))
        try:
            granted = await answer
        except asyncio.CancelledError:
            if not answer.cancelled() and answer.exception() is None:  # it came in the same turn of the loop
                self._end_unused(answer.result())
            raise
        if granted.refusal is not None:
            raise RateLimitedError(granted.refusal, retry_after=granted.retry_after)
        context.quota = RequestQuota(number, self._tell)

    def answered(self, granted: Granted) -> None:
        quota, answer = self._waiting.pop(granted.id)
        quota.limit_headers = granted.headers
        if not answer.done():
            answer.set_result(granted)
        else:
            self._end_unused(granted)

    def _end_unused(self, granted: Granted) -> None:
        """Who asked has left."""
        if granted.refusal is None:
            self._tell(Ended(id=granted.id))

    def close(self) -> None:
        """The supervisor does not answer any more."""
        for _, answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(NotReadyError("The server is shutting down.", retry_after=_RETRY_AFTER))


class DistantQuota(Quota):
    """Of a key, as a front sees it."""

    def __init__(self, digest: bytes) -> None:
        super().__init__(Limits())
        self.digest = digest
        self.limit_headers: list[tuple[bytes, bytes]] = []
        """The newest `x-ratelimit-*` headers."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        return self.limit_headers


class RequestQuota(Quota):
    """Of a request that has begun."""

    def __init__(self, number: int, tell: _Tell) -> None:
        super().__init__(Limits())
        self._number = number
        self._tell = tell

    def spend_tokens(self, count: int) -> None:
        if count:
            self._tell(Spent(id=self._number, tokens=count))

    def end(self) -> None:
        self._tell(Ended(id=self._number))


def keys_message(granted: Mapping[bytes, Principal] | None) -> Keys:
    """None: no keys are asked for."""
    return Keys(keys=None if granted is None else tuple(_entry(*item) for item in granted.items()))


def _entry(digest: bytes, principal: Principal) -> GrantedKey:
    return GrantedKey(
        digest=digest,
        key=principal.key,
        tenant=principal.tenant,
        roles=tuple(principal.roles),
        models=principal.models,
        priority=principal.priority,
        limited=principal.quota is not None,
    )


def granted_by(message: Keys) -> dict[bytes, Principal] | None:
    """As a front has them: what they may use is counted by the supervisor."""
    return None if message.keys is None else {entry.digest: _principal(entry) for entry in message.keys}


def _principal(entry: GrantedKey) -> Principal:
    return Principal(
        tenant=entry.tenant,
        key=entry.key,
        roles=frozenset(entry.roles),
        models=entry.models,
        priority=entry.priority,
        quota=DistantQuota(entry.digest) if entry.limited else None,
    )
