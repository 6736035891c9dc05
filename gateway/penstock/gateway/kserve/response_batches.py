"""Takes together what a stream has ready, so that it can leave in one write."""

from __future__ import annotations

from penstock.classic.base import ResponseStream
from penstock.classic.messages import InferResponse

MAX_TOGETHER = 64


async def next_together(stream: ResponseStream) -> list[InferResponse]:
    """Waits for a response, and takes with it those that need no waiting for; empty when the stream has ended."""
    try:
        found = [await stream.__anext__()]
    except StopAsyncIteration:
        return []
    while not found[-1].final and len(found) < MAX_TOGETHER:
        more = stream.ready()
        if more is None:
            break
        found.append(more)
    return found
