"""`penstock loadtest mock`."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Mapping
from typing import Any

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.mock.options import MockOptions
from penstock.loadtest.mock.server import Mock
from penstock.loadtest.options import converted


def main(settings: Mapping[str, Any]) -> int:
    """Serves until it is told to stop. Raises LoadTestError when it cannot."""
    options = converted(settings, MockOptions)
    try:
        asyncio.run(serve(options, asyncio.Event()))  # not uvloop: it gathers writes
    except OSError as error:
        raise LoadTestError(f"cannot listen on {options.host}:{options.port}: {error.strerror}") from None
    return 0


async def serve(options: MockOptions, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    async with Mock(options) as mock:
        host = f"[{options.host}]" if ":" in options.host else options.host
        print(f"listening on http://{host}:{mock.port}, the truth is at /truth", flush=True)
        gc.collect()
        gc.freeze()
        await stop.wait()
