"""One front as the supervisor sees it: its process, the connection to it, and what it has taken."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp

from penstock.classic.python.link import ArenaFiles
from penstock.classic.python.worker.wire import Buffer
from penstock.classic.statistics import ModelStatistics
from penstock.engines.errors import EngineError, PenstockError
from penstock.engines.host.black_box import BlackBox
from penstock.engines.host.crash_folder import Crash, keep_evidence
from penstock.gateway.apis.usage.ledger import RequestUsage
from penstock.gateway.processes.fronts.messages import (
    Answer,
    Ask,
    Begin,
    Cancelled,
    CancelRequest,
    Counted,
    Drain,
    Ended,
    Expire,
    Failed,
    FromFront,
    FromSupervisor,
    Holds,
    Idle,
    Leave,
    Report,
    Reported,
    RequestsWatched,
    Serving,
    Spent,
    Stop,
    Table,
    WatchRequests,
    decode_from_front,
)
from penstock.gateway.processes.fronts.model_table import FrontHolds, Used
from penstock.gateway.processes.fronts.passed_requests import PassedRequests
from penstock.gateway.processes.fronts.passing import FromAnswering, FromPassing, PassedMessage
from penstock.gateway.processes.fronts.quotas import QuotaDesk
from penstock.gateway.processes.model_host.connection import HostConnection
from penstock.gateway.processes.model_host.host import HostedFront, ModelHost
from penstock.gateway.processes.model_host.messages import UpMessage
from penstock.gateway.requests.call import DrainState
from penstock.gateway.requests.quota import Quota
from penstock.gateway.requests.request_watch import RequestChoice
from penstock.gateway.transports.grpc.server import FindHandler

logger = logging.getLogger("penstock")

_ENDING_SECONDS = 1.0
"""That a process may live on when its connection has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the supervisor has for its fronts."""

    host: ModelHost
    drain: DrainState
    quota_of: Callable[[bytes], Quota | None]
    """Of a key, by its digest."""
    add_usage: Callable[[RequestUsage], None]
    """Told what each request has used."""
    app: ASGIApp
    """Answers HTTP requests that fronts do not serve themselves."""
    find_handler: FindHandler
    """Finds what answers such an RPC."""
    crash_folder: Path | None = None
    """Where it is kept what is known of a process that dies; None: nowhere."""


class FrontProcess:
    """From `start` to `ended`. Implements Interruptible: to the drain of the server it is one call."""

    def __init__(self, number: int, sockets: Mapping[str, socket.socket], services: Services) -> None:
        """`sockets`: what it listens on, by the port's kind."""
        self.number = number
        self.reported: Reported | None = None
        """The newest."""
        self.on_report: Callable[[Reported], None] = _nobody
        self._pending: list[tuple[ModelStatistics, int]] = []
        """What requests that wait at this front have added to statistics."""
        self._sockets = sockets
        self._services = services
        self._drain = services.drain
        self._desk = QuotaDesk(services.quota_of)
        self._passed = PassedRequests(services.app, services.find_handler, self.send)
        self._box: BlackBox | None = None
        self._settings: dict[str, Any] = {}
        self._holds = FrontHolds()
        self._process: asyncio.subprocess.Process | None = None
        self._connection: HostConnection | None = None
        self._hosted: HostedFront | None = None
        """Its requests to the models of this process."""
        self._serving = asyncio.Event()
        self._failure = ""
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self.ended: asyncio.Task[int] | None = None
        """Its process: done when that has ended and everything is given back; the exit status."""

    @property
    def serving(self) -> bool:
        return self._serving.is_set()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(
        self, first: Callable[[], Sequence[FromSupervisor]], new_table: Callable[[], tuple[Table, Used]]
    ) -> None:
        """Returns when its ports are open. Raises EngineError. `first` gives the first messages; then comes the table.
        Both are asked once messages can be sent: what changes before that nobody tells the front."""
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as failing:
            failing.callback(ours.close)
            try:
                files = ArenaFiles("penstock-front")
                failing.callback(files.close)
                self._box = BlackBox()
                listeners = (listener.fileno() for listener in self._sockets.values())
                descriptors = [self._box.descriptor, theirs.fileno(), files.down, files.up, *listeners]
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "penstock.gateway.server.front_server",
                    *map(str, descriptors),
                    pass_fds=descriptors,
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,  # what a terminal sends is for the supervisor
                )
            except OSError as error:
                raise EngineError(f"front {self.number} cannot be started: {error}") from error
            failing.pop_all()
        self._connection = connection = HostConnection(files.up, files.down, decode_from_front, self._take, self._lost)
        await connection.open(ours)
        for message in first():
            if isinstance(message, Begin):
                self._settings = msgspec.to_builtins(message.config)
            connection.send(message)
        self._hosted = self._services.host.join(connection)
        self.send_table(*new_table())
        self.ended = asyncio.create_task(self._until_end(connection, self._process))
        serving = asyncio.create_task(self._serving.wait())
        await asyncio.wait((self.ended, serving), return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        if not self.serving:
            reason = self._failure or f"it ended with status {await self.ended}"
            if not self._failure:
                self.keep_evidence(reason)
            raise EngineError(f"front {self.number} cannot be started: {reason}")

    def _lost(self) -> None:
        """The connection has ended: the front has, or has sent what makes no sense, and another one takes its place."""
        self._serving.clear()
        if self._hosted is not None:
            self._hosted.lost()
        self._passed.lost()
        self._desk.close()
        self._holds.close()
        self.forget_pending()
        self._drain.wait_no_more(self)
        for answer in self._answers.values():
            answer.cancel()
        self._answers.clear()

    async def _until_end(self, connection: HostConnection, process: asyncio.subprocess.Process) -> int:
        await connection.ended
        with suppress(TimeoutError):
            async with asyncio.timeout(_ENDING_SECONDS):
                return await process.wait()
        self.kill()
        return await process.wait()

    def _take(self, message: FromFront | UpMessage | FromPassing, tail: memoryview) -> None:
        match message:
            case Serving():
                self._serving.set()
            case Failed():
                self._failure = message.reason
                if self.serving:
                    logger.error("front %d: %s: stopping it", self.number, message.reason)
                    self.kill()
            case Holds():
                self._holds.take(message)
            case Ask():
                self.send(self._desk.ask(message))
            case Spent():
                self._desk.spent(message)
            case Ended():
                self._desk.ended(message)
            case Counted():
                self._services.add_usage(message.usage)
            case Reported():
                self.reported = message
                self.on_report(message)
                self._answer(message)
            case RequestsWatched() | Cancelled():
                self._answer(message)
            case Idle():
                self._drain.wait_no_more(self)
            case PassedMessage():
                self._passed.heard(message, tail)
            case _ if self._hosted is not None:
                self._hosted.heard(message, tail)

    def add_pending(self, statistics: ModelStatistics, number: int) -> None:
        statistics.pending += number
        self._pending.append((statistics, number))

    def forget_pending(self) -> None:
        for statistics, number in self._pending:
            statistics.pending -= number
        self._pending.clear()

    def _answer(self, message: Answer) -> None:
        answer = self._answers.pop(message.id, None)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def send(self, message: FromSupervisor | FromAnswering, *, tail: Buffer = b"") -> None:
        if self._connection is not None:
            self._connection.send(message, tail=tail)

    def send_table(self, table: Table, used: Used) -> None:
        self._holds.sent(table, used)
        self.send(table)

    async def report(self, seconds: float) -> bool:
        """Whether it has said in this time what it has counted."""
        return await self._ask(Report(id=next(self._numbers)), seconds) is not None

    async def watch_requests(self, choice: RequestChoice, seconds: float) -> RequestsWatched | None:
        """None: it does not say that in this time."""
        answer = await self._ask(WatchRequests(id=next(self._numbers), choice=choice), seconds)
        return answer if isinstance(answer, RequestsWatched) else None

    async def cancel_request(self, request: str, seconds: float) -> bool:
        """Whether it had such a request, and has ended it."""
        answer = await self._ask(CancelRequest(id=next(self._numbers), request=request), seconds)
        return isinstance(answer, Cancelled) and answer.done

    async def _ask(self, message: Report | WatchRequests | CancelRequest, seconds: float) -> Answer | None:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[message.id] = answer
        self.send(message)
        await asyncio.wait((answer,), timeout=seconds)
        if not answer.done():
            self._answers.pop(message.id, None)
        return answer.result() if answer.done() and not answer.cancelled() else None

    def leave(self) -> None:
        """Its clients are asked to go elsewhere."""
        self.send(Leave())

    def drain(self) -> None:
        """No new requests from now on; the drain waits for those that run."""
        if self.serving:
            self._drain.wait_for(self)
            self.send(Drain())

    def interrupt(self, error: PenstockError) -> None:
        self.send(Expire())

    async def stop(self, seconds: float) -> None:
        """Its ports are closed, and it ends; after so many seconds it is killed."""
        self.send(Stop())
        if self.ended is not None:
            await asyncio.wait((self.ended,), timeout=seconds)
            if not self.ended.done():
                logger.warning("front %d does not end: killing it", self.number)
                self.kill()
                await self.ended
        await self._passed.stop()

    def keep_evidence(self, reason: str) -> None:
        """Of its process, which has died."""
        if self._process is not None and self._box is not None:
            pid, status = self._process.pid, self._process.returncode
            crash = Crash("front", str(self.number), pid, status, reason, self._settings)
            keep_evidence(self._services.crash_folder, crash, self._box)

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()


def _nobody(report: Reported) -> None:
    """Nobody wants to know."""
