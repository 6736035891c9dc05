"""Shadows: requests that are also sent to a model whose answer is only compared. Nobody waits for them: each is a
`Detached` request, bounded in number and time, and its errors are only counted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from penstock.classic.tensors import Tensor
from penstock.engines.errors import DeadlineExceededError, OverloadedError
from penstock.gateway.configuration.traffic_rules import ShadowRule
from penstock.gateway.models.traffic.route import fraction
from penstock.gateway.requests.call import Detached, RequestJournal
from penstock.gateway.requests.context import Principal, RequestContext

logger = logging.getLogger("penstock.traffic")


def same_tensors(answered: Sequence[Tensor], other: Sequence[Tensor], rule: ShadowRule) -> bool:
    """The same outputs in any order: equal, or numbers within the tolerance. NaN equals NaN."""
    theirs = {tensor.name: tensor for tensor in other}
    if len(theirs) != len(answered):
        return False
    return all(tensor.name in theirs and _same(tensor, theirs[tensor.name], rule) for tensor in answered)


def _same(answered: Tensor, other: Tensor, rule: ShadowRule) -> bool:
    ours, theirs = answered.array, other.array
    if answered.datatype != other.datatype or ours.shape != theirs.shape:
        return False
    if answered.datatype in ("BYTES", "BOOL"):
        return bool((ours == theirs).all())
    if not (rule.absolute_tolerance or rule.relative_tolerance) and ours.dtype.kind in "iu":
        return bool(np.array_equal(ours, theirs))
    wide_ours, wide_theirs = ours.astype(np.float64), theirs.astype(np.float64)
    return bool(
        np.allclose(wide_theirs, wide_ours, rtol=rule.relative_tolerance, atol=rule.absolute_tolerance, equal_nan=True)
    )


_A = TypeVar("_A")


class Result(StrEnum):
    EQUAL = "equal"
    DIFFERENT = "different"
    FAILED = "failed"
    """The shadow had an error."""
    DROPPED = "dropped"
    """Too many were in flight, the shadow had no room or was not ready, the time was over, or the server drained."""
    UNCOMPARED = "uncompared"
    """The target's own request had no answer, or answers are drawn at random."""
    SKIPPED = "skipped"
    """Nothing that can be sent twice: part of a sequence, a stream of a decoupled model, or for embeddings."""


class Shadow(Generic[_A]):
    """One under way: to be told once how the target's own request ended."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[_A | None] = asyncio.get_running_loop().create_future()
        self.result = Result.UNCOMPARED

    def answered(self, answer: _A | None) -> None:
        """None: there was no answer, or none to compare with. Idempotent."""
        if not self.answer.done():
            self.answer.set_result(answer)


class Shadows:
    """Those of one public name."""

    def __init__(self, rule: ShadowRule) -> None:
        self.rule = rule
        self.results: Counter[Result] = Counter()
        self._journal = RequestJournal()
        """Their own: they are in no log, and count for no key."""
        self._running: dict[Shadow[Any], Detached] = {}
        self._stopped = False

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def wants(self, key: bytes) -> bool:
        """Whether this request is one of the share."""
        return fraction(key, f"shadow {self.rule.id}") * 100 <= self.rule.percent

    def context(self, tenant: str) -> RequestContext:
        """For a shadow of this tenant's request: it is computed while no other request is."""
        deadline = time.monotonic() + self.rule.timeout_s
        return RequestContext(principal=Principal(tenant=tenant), background=True, deadline=deadline)

    def begin(
        self, context: RequestContext, ask: Callable[[], Awaitable[_A]], same: Callable[[_A, _A], Awaitable[bool]]
    ) -> Shadow[_A] | None:
        """Both are called in a task; `same` compares the target's answer with what `ask` gives. `context` is the
        shadow's own. None where it is dropped."""
        if self._stopped or len(self._running) >= self.rule.max_in_flight:
            self.results[Result.DROPPED] += 1
            return None
        shadow = Shadow[_A]()
        detached = Detached(
            context, self._journal, partial(self._compare, ask, same, shadow), partial(self._ended, shadow)
        )
        self._running[shadow] = detached
        detached.start()
        return shadow

    def stop(self) -> None:
        """Ends all of them, and begins no more."""
        self._stopped = True
        for detached in self._running.values():
            detached.cancel()

    async def _compare(
        self, ask: Callable[[], Awaitable[_A]], same: Callable[[_A, _A], Awaitable[bool]], shadow: Shadow[_A]
    ) -> None:
        async with asyncio.timeout(self.rule.timeout_s):
            theirs = await ask()
        ours = await shadow.answer
        if ours is not None:
            shadow.result = Result.EQUAL if await same(ours, theirs) else Result.DIFFERENT

    def _ended(self, shadow: Shadow[Any], error: BaseException | None) -> None:
        del self._running[shadow]
        self.results[shadow.result if error is None else self._failure(error)] += 1

    def _failure(self, error: BaseException) -> Result:
        if isinstance(error, asyncio.CancelledError | TimeoutError | OverloadedError | DeadlineExceededError):
            return Result.DROPPED
        logger.debug("a shadow request to %s failed: %s", self.rule.id, error)
        return Result.FAILED
