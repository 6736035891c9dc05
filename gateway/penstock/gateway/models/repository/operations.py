"""Loads and unloads under way, each a task of its own which goes on when its caller is cancelled; and polls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from penstock.engines.errors import NotReadyError, PenstockError
from penstock.engines.host.failure_text import as_load_error

logger = logging.getLogger("penstock")

STOPPING = "the server is shutting down"


class Operations:
    def __init__(self) -> None:
        self.under_way: set[asyncio.Task[None]] = set()

    def start(self, name: str, operation: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """`name`: the model's, for the log, which tells why an operation has failed."""
        task = asyncio.create_task(operation, name=name)
        self.under_way.add(task)
        task.add_done_callback(self._ended)
        return task

    def run(self, name: str, operation: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        """To be awaited. The operation goes on when its caller is cancelled: half a load helps nobody."""
        return asyncio.shield(self.start(name, operation))

    async def request(self, name: str, operation: Coroutine[Any, Any, None]) -> None:
        """An operation on request. Raises PenstockError: NotReadyError when the server stops meanwhile."""
        ending = self.run(name, operation)
        try:
            await ending
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise NotReadyError(STOPPING) from None
        except Exception as error:
            raise as_load_error(error) from error

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.under_way.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("model '%s': %s", task.get_name(), as_load_error(error).message)


async def poll_forever(poll: Callable[[], Awaitable[None]], seconds: float) -> None:
    """Polls `seconds` after the last poll ended. A poll that fails, as when a store is down, changes nothing."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await poll()
        except PenstockError as error:
            logger.warning("the model repositories could not be polled: %s", error.message)
        except Exception:
            logger.exception("the model repositories could not be polled")
