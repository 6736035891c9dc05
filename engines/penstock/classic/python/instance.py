"""An instance of a model in a process of its own: watched, and replaced when it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextvars import Context

from penstock.classic.base import AsyncInstance, Batch
from penstock.classic.python.session import ModelProgram, Session
from penstock.engines.errors import EngineError, NotReadyError, PenstockError

logger = logging.getLogger(__name__)

_MAX_FAILURES = 5
"""Starts that may fail in a row before the instance stays down."""
_CRASH_WINDOW = 60.0
"""Seconds; each crash within them makes the next start come later."""
_MAX_DELAY = 10.0
"""Seconds before a start."""
_PROBE_INTERVAL = 1.0
_PROBE_LIMIT = 5.0
"""Seconds that a model's is_ready() may take, as in Triton."""


class PythonInstance(AsyncInstance):
    def __init__(self, program: ModelProgram) -> None:
        self._program = program
        self._session: Session | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._healthy = True
        self._answered = asyncio.Event()
        """The model has said for the first time whether it is ready, or has let the time for that pass."""
        self._lost: PenstockError | None = None
        self._changed = asyncio.Event()
        self._crashes: deque[float] = deque()

    @property
    def pid(self) -> int | None:
        """The process's; None while there is none."""
        return self._session.process.pid if self._session is not None else None

    @property
    def ready(self) -> bool:
        return self._session is not None

    @property
    def says_ready(self) -> bool:
        return self._healthy

    async def start(self) -> None:
        self._session = await Session.open(self._program)
        # outlives the request that loads the model: its log lines are not that request's
        self._supervision = asyncio.create_task(self._supervise(self._session), context=Context())
        if self._session.has_is_ready:
            try:
                async with asyncio.timeout(_PROBE_LIMIT):
                    await self._answered.wait()
            except TimeoutError:
                self._set_healthy(False)
            except BaseException:
                await self.unload()
                raise

    async def execute(self, batch: Batch) -> None:
        session = self._session
        if session is None:
            raise self._lost or NotReadyError(f"Stub process '{self._program.name}' is not healthy.", retry_after=1)
        await session.execute(batch)

    async def wait_ready(self) -> None:
        while not self.ready:
            if self._lost is not None:
                raise self._lost
            self._changed.clear()
            await self._changed.wait()

    async def unload(self) -> None:
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
            self._supervision = None  # the frames of its end know this object: its files would stay open
        session, self._session = self._session, None
        if session is not None:
            session.finalize()
            try:
                await session.process.end(self._program.launch.options.stub_timeout_seconds)
            finally:
                session.fail_all(NotReadyError("the model is being unloaded"))
                session.close()

    def kill(self) -> None:
        if self._supervision is not None:
            self._supervision.cancel()  # it would start another process
        if self._session is not None:
            self._session.process.kill()

    async def _supervise(self, session: Session | None) -> None:
        while session is not None:
            reason = await self._until_dead(session)
            self._session = None
            session.close()
            count = session.fail_all(session.dead())
            logger.error("%s: %s; %d requests end with an error", self._program.name, reason, count)
            await session.process.end(0)
            session.keep_evidence(reason)
            session = await self._revived()
            self._session = session
            self._changed.set()

    async def _until_dead(self, session: Session) -> str:
        if not session.has_is_ready:
            return await session.ended()
        probe = asyncio.create_task(self._probe(session))
        try:
            return await session.ended()
        finally:
            probe.cancel()

    async def _probe(self, session: Session) -> None:
        """Asks the model again and again. An answer that comes too late counts when it comes."""
        while True:
            probe = asyncio.ensure_future(session.is_ready())
            try:
                done, _ = await asyncio.wait((probe,), timeout=_PROBE_LIMIT)
                if not done:
                    self._set_healthy(False)
                self._set_healthy(await probe)
            finally:
                probe.cancel()
            await asyncio.sleep(_PROBE_INTERVAL)

    def _set_healthy(self, healthy: bool) -> None:
        self._answered.set()
        if healthy != self._healthy:
            self._healthy = healthy
            logger.warning("%s says that it is %sready", self._program.name, "" if healthy else "not ")

    async def _revived(self) -> Session | None:
        """A new session, or None when the instance stays down."""
        now = time.monotonic()
        self._crashes.append(now)
        while now - self._crashes[0] > _CRASH_WINDOW:
            self._crashes.popleft()
        delay = _delay(len(self._crashes) - 1)
        lost: EngineError | None = None
        for failure in range(1, _MAX_FAILURES + 1):
            await asyncio.sleep(delay)
            try:
                session = await Session.open(self._program)
            except EngineError as error:
                logger.error("%s could not be restarted: %s", self._program.name, error.message)
                lost = EngineError(f"Stub process '{self._program.name}' is not healthy: {error.message}")
                delay = _delay(failure)
                continue
            logger.warning("%s has been restarted", self._program.name)
            self._healthy = True
            return session
        self._lost = lost  # not before: who waits for the instance gives it up then
        logger.critical("%s stays down", self._program.name)
        return None


def _delay(previous: int) -> float:
    """0, 0.5, 1, 2, 4, 8, 10, 10 ..."""
    return min(_MAX_DELAY, 0.25 * 2.0**previous) if previous else 0.0
