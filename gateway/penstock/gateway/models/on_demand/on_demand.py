"""Loading on demand: models are loaded when requests ask for them, and others unloaded to make room.

A load uses its model, and then each request that waited for it, without a gap, until the request's end: what is in use
stays. `residents.py` says what may be unloaded. If that is not enough, models that have had their time take no new
requests until those that run have ended: so no model that is asked for all the time keeps another one out.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass

from penstock.engines.errors import (
    DeadlineExceededError,
    EngineError,
    MemoryBudgetError,
    ModelNotFoundError,
    NotReadyError,
    PenstockError,
    QueueFullError,
)
from penstock.gateway.models.on_demand.counts import Counts
from penstock.gateway.models.on_demand.loads import Loads, OnDemandSettings
from penstock.gateway.models.on_demand.residents import Failures, Residents, choose
from penstock.gateway.requests.context import Principal, RequestContext, Role, deadline_exceeded

logger = logging.getLogger("penstock")

Check = Callable[[Collection[str]], object]
"""Raises MemoryBudgetError if a model would not fit even without these."""


FOR_ROOM = "unloaded to make room"
IDLE = "unloaded because nobody used it"

_RETRY_AFTER = 5.0
_LOOK_SECONDS = 1.0
"""How often a load that waits for room looks for what nobody tells it: sequences that have ended."""


@dataclass(slots=True, eq=False)
class _Load:
    """One load, for any number of requests."""

    task: asyncio.Task[None] | None = None
    waiting: int = 0
    """Requests. Each waits for a bounded time; without one, the load waits for room no longer."""
    end_use: Callable[[], None] | None = None
    """The load uses the model until all that waited for it do so themselves."""
    needs_room: bool = False
    """It waits for others to go, or has given that up."""


_current: ContextVar[_Load | None] = ContextVar("current_load_on_demand", default=None)
"""The load that the current task belongs to: the models of an ensemble are loaded for the ensemble."""
_together: ContextVar[frozenset[str]] = ContextVar("models_that_are_loaded_together", default=frozenset())
"""All models of the ensembles that the current task loads models for: none of them makes room for another one."""


class OnDemand:
    """Knows models by their own names: who may use them, and what traffic rules make of a public name, is the
    catalogue's matter. Lives on the event loop. `attach` comes before everything else."""

    def __init__(self, settings: OnDemandSettings | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings or OnDemandSettings()
        self._clock = clock
        self._residents = Residents()
        self._failures = Failures()
        self._held_out: set[str] = set()
        """Unloaded by request: only a load request brings them back."""
        self._closing: set[str] = set()
        """They take no new requests and are unloaded when those that run have ended. They are not loaded again before
        the model that needs their room has it."""
        self._loading: dict[str, _Load] = {}
        self._waited: dict[str, float] = {}
        """How long the load of a model has waited for room: no reason for it to stay longer."""
        self._changed = asyncio.Event()
        self._idle_seconds = self._settings.idle_seconds or math.inf
        self._idle_watch: asyncio.Task[None] | None = None
        self._idle_changed = asyncio.Event()
        """A model that has its own idle time may be due earlier than was known."""
        self.counts = Counts()

    def attach(self, loads: Loads) -> None:
        self._loads = loads

    # What the catalogue asks

    async def offers(self, name: str) -> bool:
        """Whether a request would have this model, which serves or would be loaded for it. Raises NotReadyError, with
        the reason, while one that could not be loaded is not tried again."""
        if self._loads.serves(name):
            return True
        if name in self._held_out or not await self._loads.exists(name):
            return False
        self._check_failure(name)
        return True

    def would_load(self, name: str, *, generates: bool = False) -> bool:
        """Whether a request would load this model, which is not loaded, as far as it is known. `generates`: only
        those that chats may be for count. Raises NotReadyError as `offers`."""
        if name in self._held_out or not self._loads.knows(name):
            return False
        if generates and not self.may_generate(name):
            return False
        self._check_failure(name)
        return True

    def generating_models(self) -> list[str]:
        """Those that are not loaded and would be."""
        return [
            name
            for name in self._loads.stored()
            if self._loads.generates(name) and not self._loads.serves(name) and name not in self._held_out
        ]

    def may_generate(self, name: str) -> bool:
        """False for a model that is known to be of another kind than those that generate."""
        return self._loads.generates(name) is not False

    def is_upstream(self, name: str) -> bool:
        """Whether it is known to be another server's."""
        return self._loads.is_upstream(name)

    async def use(self, name: str, context: RequestContext) -> None:
        """Returns when the model serves; it stays until the request has ended. For a model that there is not, nothing
        happens: looking it up says what is wrong.

        Raises QueueFullError, NotReadyError, DeadlineExceededError, and what the load raised.
        """
        if not context.uses(name):
            end = await self._use(name, context.deadline, waits=self.is_closing(name))
            if end is not None:
                context.use(name, end)

    async def _use(self, name: str, deadline: float | None, *, waits: bool) -> Callable[[], None] | None:
        """What ends the use; None: there is no such model. `waits`: also for a model that serves. Raises as `use`."""
        if self._loads.serves(name) and not waits:
            return self._used(name)
        return await self._wait(name, deadline) if await self.offers(name) else None

    def keep(self, name: str, seconds: float | None, caller: Principal) -> bool:
        """How long the model stays without a request from now on, in place of `idle_seconds`, until it is unloaded;
        None: for ever. With 0 it goes when the requests that use it have ended. False: it is not unloaded for that."""
        if name not in self._residents or name in self._residents.kept():
            return False
        at_once = seconds == 0 and Role.ADMIN in caller.roles  # others could make the server load all the time
        self._residents.keep(name, math.inf if seconds is None else seconds, 0.0 if at_once else math.inf)
        self._watch_idle()
        self._idle_changed.set()
        return True

    def seconds_left(self, name: str) -> float | None:
        """Until the model is unloaded if nobody uses it; None: it is not."""
        if name not in self._residents or name in self._residents.kept():
            return None
        until = self._residents.idle_until(name, self._idle_seconds)
        return None if math.isinf(until) else max(0.0, until - self._clock())

    async def use_for_model(self, name: str, deadline: float | None) -> Callable[[], None]:
        """As `use`, for a model that asks another one; to be called at the end. Nobody holds such requests back: those
        of the model that asks would not end."""
        return await self._use(name, deadline, waits=False) or no_use

    # What the repository tells

    def loaded(self, name: str, took: float, parts: Iterable[str], *, kept: bool) -> None:
        """`kept`: it is never unloaded to make room."""
        self._held_out.discard(name)
        self._failures.forget(name)
        took -= self._waited.pop(name, 0.0)
        self._residents.loaded(name, self._clock(), max(0.0, took), parts, kept=kept)
        self._tell()

    def left(self, name: str) -> None:
        self._residents.left(name)
        self._tell()

    def hold_out(self, names: Iterable[str]) -> None:
        """They were unloaded by request."""
        self._held_out.update(names)

    def asked_for(self, name: str) -> None:
        """A load request has come."""
        self._held_out.discard(name)
        self._failures.forget(name)

    def start(self) -> None:
        if self._settings.idle_seconds:
            self._watch_idle()

    async def stop(self) -> None:
        tasks = [load.task for load in self._loading.values() if load.task is not None]
        tasks += [self._idle_watch] if self._idle_watch is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @contextmanager
    def together(self, names: frozenset[str]) -> Iterator[None]:
        """Tasks that begin within this load models of one ensemble, which is made of all these."""
        token = _together.set(_together.get() | names)
        try:
            yield
        finally:
            _together.reset(token)

    # What the memory budget asks

    async def make_room(self, name: str, check: Check) -> bool:
        """Unloads what has to go for this model; False if that cannot be. Raises MemoryBudgetError when the model would
        not even fit if everything were unloaded that may be."""
        together = _together.get() - {name}
        stays = self._residents.kept() | together
        try:
            check([other for other in self._loads.stored() if other not in stays and other != name])
        except MemoryBudgetError as error:
            if not together:
                raise
            beside = ", ".join(sorted(together))
            raise MemoryBudgetError(f"{error.message}; an ensemble needs it at the same time as {beside}") from None

        def enough(gone: Collection[str]) -> bool:
            with suppress(MemoryBudgetError):
                check(gone)
                return True
            return False

        load = _current.get()
        closed: set[str] = set()
        started = self._clock()
        try:
            async with self._loads.without_slot():
                while not enough(()):
                    now = self._clock()
                    if victims := choose(
                        _without({name, *together}, self._residents.free(now, self._loads.is_busy)), enough
                    ):
                        closed |= self._close(victims)
                        await self._retire(victims, FOR_ROOM, "room")
                        break
                    if load is None or not load.waiting:
                        return False
                    load.needs_room = True
                    used = _without({name, *together}, self._residents.replaceable(now, self._loads.keeps_sequences))
                    used.sort(key=lambda other: other not in self._closing)  # they do not all close as uses of them end
                    closed |= self._close(choose(used, enough) or ())
                    safe_until = self._residents.next_end_of_safety(now)
                    await self._change(_LOOK_SECONDS if safe_until is None else min(_LOOK_SECONDS, safe_until - now))
            if load is not None:
                load.needs_room = False
            return True
        finally:
            self._closing -= closed
            self._waited[name] = self._waited.get(name, 0.0) + self._clock() - started
            self._tell()

    def _close(self, names: Iterable[str]) -> set[str]:
        """Those that were not closed before."""
        closing = set(names) - self._closing
        self._closing |= closing
        return closing

    # Waiting and loading

    def _used(self, name: str) -> Callable[[], None]:
        self._residents.begin(name, self._clock())

        def end() -> None:
            self._residents.end(name, self._clock())
            if self._loading:
                self._tell()
            if self._residents.has_own_idle_time(name):
                self._idle_changed.set()

        return end

    def is_closing(self, name: str) -> bool:
        """Whether it takes no new requests of clients, nor something that it is made of."""
        return bool(self._closing) and not self._closing.isdisjoint(self._residents.with_parts(name))

    def _check_failure(self, name: str) -> None:
        now = self._clock()
        if (failure := self._failures.current(name, now)) is not None:
            raise _not_loaded(name, failure.reason, failure.until - now)

    async def _wait(self, name: str, deadline: float | None) -> Callable[[], None]:
        """Returns when the model serves, what ends its use. Raises PenstockError."""
        if self.counts.waiting >= self._settings.most_waiting:
            self.counts.refused["full"] += 1
            raise QueueFullError("Too many requests wait for models to be loaded.", retry_after=_RETRY_AFTER)
        now = self._clock()
        load = self._loading.get(name) or self._begin(name)
        ends = now + self._settings.wait_seconds
        seconds = (ends if deadline is None else min(ends, deadline)) - now
        load.waiting += 1
        self.counts.waiting += 1
        assert load.task is not None
        try:
            done, _ = await asyncio.wait((load.task,), timeout=max(0.0, seconds))
            if not done:
                self.counts.refused["time"] += 1
                raise self._too_late(name, load, deadline)
            if load.task.cancelled():
                raise NotReadyError("The server is shutting down.", retry_after=_RETRY_AFTER)
            if (error := load.task.exception()) is not None:
                raise copy.copy(error)  # each has a traceback of its own
            return self._used(name)
        finally:
            self.counts.waiting -= 1
            load.waiting -= 1
            self._end_unused(load)

    def _too_late(self, name: str, load: _Load, deadline: float | None) -> DeadlineExceededError | NotReadyError:
        if deadline is not None and self._clock() >= deadline:
            return deadline_exceeded()
        if load.needs_room:
            return _no_room(name)
        return NotReadyError(f"model '{name}' is still being loaded", retry_after=_RETRY_AFTER)

    def _begin(self, name: str) -> _Load:
        load = self._loading[name] = _Load()
        load.task = asyncio.create_task(self._load(name, load))
        load.task.add_done_callback(lambda task: self._ended(name, task))
        return load

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        load = self._loading.pop(name)
        if not task.cancelled():
            task.exception()  # perhaps nobody waits for it any more
        self._end_unused(load)

    def _end_unused(self, load: _Load) -> None:
        if load.waiting:
            return
        if load.task is None or not load.task.done():
            self._tell()
        elif load.end_use is not None:
            load.end_use()
            load.end_use = None

    async def _load(self, name: str, load: _Load) -> None:
        """Raises PenstockError."""
        _current.set(load)
        while self.is_closing(name):
            await self._change(_LOOK_SECONDS)
        load.end_use = self._used(name)
        if self._loads.serves(name):  # it need not go, after all
            return
        started = self._clock()
        logger.info("model '%s' is loaded on demand", name)
        try:
            await self._loads.load_stored(name)
        except ModelNotFoundError:
            raise
        except PenstockError as error:
            raise self._failed(name, load, error) from error
        except Exception as error:
            raise self._failed(name, load, EngineError("an unexpected error, which the server's log shows")) from error
        self.counts.loaded(name, self._clock() - started)

    def _failed(self, name: str, load: _Load, error: PenstockError) -> NotReadyError:
        self._waited.pop(name, None)
        if load.needs_room:
            self.counts.failed[name, "no_room"] += 1
            return _no_room(name)
        self.counts.failed[name, "error"] += 1
        reason = error.message.removeprefix(f"load failed for model '{name}': ")
        failure = self._failures.add(name, reason, self._clock())
        return _not_loaded(name, failure.reason, failure.pause)

    # Unloading

    async def _retire(self, names: Collection[str], reason: str, why: str) -> None:
        for name in names:
            self.counts.unloads[name, why] += 1
            logger.info("model '%s' is %s", name, reason)
        await asyncio.gather(*[self._loads.retire(name, reason) for name in names])

    def _watch_idle(self) -> None:
        if self._idle_watch is None:
            self._idle_watch = asyncio.create_task(self._unload_idle())

    async def _unload_idle(self) -> None:
        while True:
            self._idle_changed.clear()
            now = self._clock()
            ends = self._residents.idle_ends(self._idle_seconds)
            due = [name for name in self._residents.free(now, self._loads.is_busy) if ends[name] <= now]
            if due:
                await self._retire(due, IDLE, "idle")
                continue
            # none will be due earlier, but for those that `_idle_changed` tells of
            left = [end - now if end > now else _LOOK_SECONDS for end in ends.values()]
            seconds = min([*left, self._idle_seconds])
            with suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                    await self._idle_changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, seconds: float) -> None:
        """Returns when something has changed, and after so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()


def no_use() -> None:
    """There is no use to end."""


def _without(staying: Collection[str], names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in staying]


def _not_loaded(name: str, reason: str, seconds: float) -> NotReadyError:
    return NotReadyError(f"model '{name}' could not be loaded: {reason}", retry_after=seconds)


def _no_room(name: str) -> NotReadyError:
    message = f"there is no room for model '{name}' now: the models that would have to go are in use"
    return NotReadyError(message, retry_after=_RETRY_AFTER)
