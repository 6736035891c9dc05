"""Work that is given up when a request's time is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from penstock.engines.errors import PenstockError

_WITHOUT_END: AbstractAsyncContextManager[object] = nullcontext()


def until(deadline: float | None, error: PenstockError) -> AbstractAsyncContextManager[object]:
    """`deadline` of time.monotonic(); None: no limit. Raises `error`."""
    return _WITHOUT_END if deadline is None else _until(deadline, error)


@asynccontextmanager
async def _until(deadline: float, error: PenstockError) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise error from None
