"""The event loop of a server process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """None: asyncio's own."""
    try:
        import uvloop
    except ImportError:  # no wheels for Windows
        return None
    return uvloop.new_event_loop
