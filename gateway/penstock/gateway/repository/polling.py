"""Looking for changes in the repositories, again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from penstock.engines.errors import PenstockError

logger = logging.getLogger("penstock")


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
