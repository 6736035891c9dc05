"""`infer` of a model whose requests may ask for a stream."""

from __future__ import annotations

from collections.abc import Callable

from penstock.classic.base import ResponseStream
from penstock.classic.messages import InferResponse
from penstock.engines.errors import UnsupportedError


async def only_response(begin: Callable[[], ResponseStream], *, streams: bool) -> InferResponse:
    """For requests that do not stream: those have exactly one response. Raises UnsupportedError for others, without
    beginning, and the error that the response is."""
    if streams:
        raise UnsupportedError("a request that streams has many responses; it needs a stream to carry them")
    responses = begin()
    try:
        response = await anext(responses)
    finally:
        responses.close()
    if response.error is not None:
        raise response.error
    return response
