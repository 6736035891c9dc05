"""Starts the fronts, tells them what has changed, and replaces those that die."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.engines.errors import EngineError, PenstockError
from penstock.gateway.apis.kserve.store import ModelStore
from penstock.gateway.models.language.kserve.language_model import LanguageModel
from penstock.gateway.processes.fronts.counts import Sums, add, samples_of
from penstock.gateway.processes.fronts.front_process import FrontProcess, Services
from penstock.gateway.processes.fronts.messages import FromSupervisor, Reported, Table
from penstock.gateway.processes.fronts.model_table import ModelTable, Used
from penstock.gateway.requests.acceptor import listener
from penstock.gateway.requests.request_watch import RequestChoice, WatchedRequests

logger = logging.getLogger("penstock")

# The ports of a server with several fronts: bound once by the supervisor, which keeps them while fronts come and go.
#
# Each front has listening sockets of its own (SO_REUSEPORT), so the kernel spreads connections evenly over the
# fronts. The supervisor has them, too, and never accepts: connections that wait when a front dies are not lost, they
# are served by the one that takes its place.

_BACKLOG = 2048


def reserve(host: str, port: int, count: int) -> list[socket.socket]:
    """So many sockets that listen on one port; 0: any free one. Raises OSError, also where another server has the port,
    one that shares ports included."""
    if port:
        listener(host, port).close()  # without SO_REUSEPORT: fails where another server has the port
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(listener(host, port, backlog=_BACKLOG, reuse_port=True))
            port = sockets[0].getsockname()[1]
    except BaseException:
        for reserved in sockets:
            reserved.close()
        raise
    return sockets


_MAX_DEATHS = 5
_WINDOW = 300.0
"""A front that dies so often in so many seconds is not replaced any more."""
_BACKOFF = 1.0
"""Seconds of delay added with each recent death; the first replacement comes at once."""
_LOOK_SECONDS = 5.0
_MOST_SILENT = 3
"""Looks in a row without an answer, after which a front hangs."""
_ASK_SECONDS = 2.0
"""That a scrape waits for what fronts have counted."""


class Slot:
    """A front's place: the sockets are its own, and stay when it dies."""

    def __init__(self, number: int, sockets: Mapping[str, socket.socket]) -> None:
        self.number = number
        self.sockets = sockets
        self.front: FrontProcess | None = None
        self.deaths: deque[float] = deque()

    def may_restart(self, now: float) -> bool:
        """A front has died."""
        while self.deaths and now - self.deaths[0] > _WINDOW:
            self.deaths.popleft()
        self.deaths.append(now)
        return len(self.deaths) <= _MAX_DEATHS

    def close(self) -> None:
        """Clients that wait on these sockets are refused; the kernel spreads connections over the others."""
        for listening in self.sockets.values():
            listening.close()


class Fronts:
    """All fronts of a server. Lives on the event loop."""

    def __init__(
        self,
        first: Callable[[int], Sequence[FromSupervisor]],
        table: ModelTable,
        models: ModelStore,
        services: Services,
        routed: Callable[[], Collection[str]],
        all_gone: Callable[[], None],
    ) -> None:
        """`first` gives the first messages for a front by its number; `routed` the names that traffic rules have;
        `all_gone` is called when no front is left."""
        self._first = first
        self._table = table
        self._models = models
        self._services = services
        self._drain = services.drain
        self._routed = routed
        self._all_gone = all_gone
        self._slots: list[Slot] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._ended = Sums()
        """What fronts that have ended had counted."""
        self._restarts = 0
        self._stopping = False
        self._changing: asyncio.Handle | None = None

    @property
    def serving(self) -> list[FrontProcess]:
        return [slot.front for slot in self._slots if slot.front is not None and slot.front.serving]

    async def start(self, sockets: Sequence[Mapping[str, socket.socket]]) -> None:
        """One front for each of these, by the port's kind. Raises EngineError."""
        self._slots = [Slot(number, listeners) for number, listeners in enumerate(sockets)]
        results = await asyncio.gather(*map(self._start, self._slots), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        self._tasks = [asyncio.create_task(self._keep(slot)) for slot in self._slots]
        self._tasks += [asyncio.create_task(self._watch(slot)) for slot in self._slots]

    async def _start(self, slot: Slot) -> None:
        front = FrontProcess(slot.number, slot.sockets, self._services)
        front.on_report = partial(self._take_statistics, front)
        slot.front = front
        await front.start(lambda: self._first(slot.number), self._new_table)
        if self._drain.draining:
            front.drain()
        elif self._drain.leaving:
            front.leave()

    def _new_table(self) -> tuple[Table, Used]:
        return self._table.new(self._routed())

    # What changes

    def tables_changed(self) -> None:
        """Fronts get a new table soon: once for all that changes now."""
        if self._changing is None and not self._stopping:
            self._changing = asyncio.get_running_loop().call_soon(self._send_tables)

    def _send_tables(self) -> None:
        self._changing = None
        table, used = self._new_table()
        for slot in self._slots:
            if slot.front is not None:
                slot.front.send_table(table, used)

    def tell(self, message: FromSupervisor) -> None:
        """All of them."""
        for slot in self._slots:
            if slot.front is not None:
                slot.front.send(message)

    # Those that die

    async def _keep(self, slot: Slot) -> None:
        while slot.front is not None and slot.front.ended is not None:
            await asyncio.wait((slot.front.ended,))  # which goes on if this is cancelled
            status = slot.front.ended.result()
            self._declare_dead(slot.front)
            if self._stopping or self._drain.draining:
                slot.close()
                return
            logger.error("front %d is dead (status %d): its connections are closed", slot.number, status)
            slot.front.keep_evidence(f"it ended with status {status}")
            if not await self._replaced(slot):
                logger.critical("front %d died %d times; it stays down", slot.number, len(slot.deaths))
                slot.close()
                slot.front = None
                if not any(other.front for other in self._slots):
                    self._all_gone()

    async def _replaced(self, slot: Slot) -> bool:
        while slot.may_restart(time.monotonic()):
            await asyncio.sleep(_BACKOFF * (len(slot.deaths) - 1))
            try:
                await self._start(slot)
            except (EngineError, OSError) as error:
                logger.error("front %d cannot be started: %s", slot.number, error)
            else:
                self._restarts += 1
                logger.warning("front %d is back", slot.number)
                return True
        return False

    def _declare_dead(self, front: FrontProcess) -> None:
        if front.reported is not None:
            self._ended.add(front.reported.samples, ended=True)
            front.reported = None

    async def _watch(self, slot: Slot) -> None:
        """Asks each front what it has counted: a front that has died is known by its last answer."""
        silent = 0
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            front = slot.front
            if front is None or not front.serving:
                silent = 0
                continue
            silent = 0 if await front.report(_LOOK_SECONDS) else silent + 1
            if silent >= _MOST_SILENT:
                logger.error("front %d does not answer: stopping it", slot.number)
                front.kill()

    # What they have counted

    def _take_statistics(self, front: FrontProcess, report: Reported) -> None:
        front.forget_pending()
        for entry in report.statistics:
            try:
                model = self._models.model(entry.name, str(entry.version))
            except PenstockError:
                continue  # unloaded meanwhile, with its statistics
            if isinstance(model, LanguageModel) and model.loaded_model is self._table.model(entry.id):
                add(model.statistics, entry.counts)
                front.add_pending(model.statistics, entry.pending)

    async def refresh(self) -> None:
        """Implements OtherProcesses."""
        await asyncio.gather(*(front.report(_ASK_SECONDS) for front in self.serving))

    def merge(self, families: dict[str, Metric]) -> None:
        sums = Sums()
        sums.add(samples_of(families.values()))
        sums.add(self._ended.samples())
        for slot in self._slots:
            if slot.front is not None and slot.front.reported is not None:
                sums.add(slot.front.reported.samples)
        families.clear()
        families.update(sums.metrics())
        fronts = GaugeMetricFamily("penstock_fronts", "Front processes that serve.", value=len(self.serving))
        text = "Front processes that have taken the place of one that died."
        restarts = CounterMetricFamily("penstock_front_restarts", text, value=self._restarts)
        families.update({family.name: family for family in (fronts, restarts)})

    async def watch_requests(self, choice: RequestChoice) -> list[WatchedRequests]:
        """As FrontRequests has it."""
        questions = [front.watch_requests(choice, _ASK_SECONDS) for front in self.serving]
        return [answer.requests for answer in await asyncio.gather(*questions) if answer is not None]

    async def cancel_request(self, request: str) -> bool:
        """As FrontRequests has it."""
        return any(await asyncio.gather(*(front.cancel_request(request, _ASK_SECONDS) for front in self.serving)))

    # The end

    def leave(self) -> None:
        for front in self.serving:
            front.leave()

    def drain(self) -> None:
        for front in self.serving:
            front.drain()

    async def stop(self, seconds: float) -> None:
        """Each front may take so many seconds to end."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in self._slots:
            slot.close()
        await asyncio.gather(*(slot.front.stop(seconds) for slot in self._slots if slot.front is not None))
