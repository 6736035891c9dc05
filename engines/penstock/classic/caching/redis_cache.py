"""A response cache in a Redis server, which several Penstocks may share. Needs the extra [redis].

The server bounds its memory by itself (`maxmemory`, `maxmemory-policy allkeys-lru`). Who may write to it decides what
clients are answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from time import monotonic
from typing import Any

import msgspec
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, ClusterDownError, RedisError, ResponseError

from penstock.classic.caching.cache import CachedResponse
from penstock.classic.messages import Parameter
from penstock.classic.tensors import from_buffer, to_buffer
from penstock.engines.errors import EngineError, InvalidRequestError

logger = logging.getLogger("penstock")

_PREFIX = b"penstock:response:1:"
"""The number is the form of what follows."""
_SILENT_SECONDS = 30.0
"""Between two lines of the log about a server that cannot be reached."""
_AWAY_SECONDS = 1.0
"""So long a server that could not be reached is not asked again: each try may take its whole time limit."""

_REFUSALS = (AuthenticationError, AuthorizationError, ResponseError)
"""What another try does not mend: a wrong password, a user who may not read, a database that there is not."""

_CONNECTIONS = 100
"""The most at the same time, without `max_connections`."""

_Stored = tuple[dict[str, Parameter], list[tuple[str, str, list[int], bytes]]]
"""Parameters; name, datatype, shape and data of each output."""


class RedisCache:
    """`options` are those of `redis.asyncio.Redis`."""

    shared = True
    counters = None

    def __init__(self, options: Mapping[str, Any]) -> None:
        connections = options.get("max_connections") or _CONNECTIONS
        # once more at once, for a connection that the server has closed; waiting is worse than computing
        retry = Retry(NoBackoff(), 1)
        self._client = redis.asyncio.Redis(**{**options, "max_connections": connections}, retry=retry)
        self._connections = asyncio.Semaphore(connections)  # the client's pool has an error instead of a queue
        self._away_until = 0.0
        self._said = -_SILENT_SECONDS

    async def start(self) -> None:
        try:
            await self._client.get(_PREFIX)
        except (RedisError, OSError, TimeoutError) as error:
            if isinstance(error, _REFUSALS) and not isinstance(error, ClusterDownError):
                code = getattr(error, "status_code", None) or type(error).__name__
                raise EngineError(
                    f"the response cache's Redis server refuses user, password or database: {code} {error}"
                ) from error
            self._away(error)

    async def lookup(self, key: bytes) -> CachedResponse | None:
        try:
            async with self._connections:
                if self._is_away:
                    return None
                data: Any = await self._client.get(_PREFIX + key)
            return None if data is None else _decode(data)
        except (RedisError, OSError, TimeoutError) as error:
            self._away(error)
        except (msgspec.DecodeError, InvalidRequestError) as error:
            logger.warning("an entry of the response cache cannot be read: %s", error)
        return None

    async def insert(self, key: bytes, response: CachedResponse) -> None:
        try:
            async with self._connections:
                if not self._is_away:
                    await self._client.set(_PREFIX + key, _encode(response))
        except (RedisError, OSError, TimeoutError) as error:
            self._away(error)

    async def close(self) -> None:
        await self._client.aclose()

    @property
    def _is_away(self) -> bool:
        return monotonic() < self._away_until

    def _away(self, error: Exception) -> None:
        now = monotonic()
        self._away_until = now + _AWAY_SECONDS
        if now - self._said >= _SILENT_SECONDS:
            self._said = now
            logger.warning("the response cache's Redis server does not answer: %s", error)


def _encode(response: CachedResponse) -> bytes:
    outputs = [
        (tensor.name, tensor.datatype, list(tensor.array.shape), to_buffer(tensor)) for tensor in response.outputs
    ]
    return msgspec.msgpack.encode((response.parameters, outputs))


def _decode(data: bytes) -> CachedResponse:
    parameters, outputs = msgspec.msgpack.decode(data, type=_Stored)
    return CachedResponse(tuple(from_buffer(*output) for output in outputs), parameters)
