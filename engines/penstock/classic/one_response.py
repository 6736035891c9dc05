"""The stream of a model that gives exactly one response."""

from __future__ import annotations

from asyncio import Task

from penstock.classic.messages import InferResponse
from penstock.engines.errors import PenstockError


class OneResponse:
    """A ResponseStream over an `infer` that has begun."""

    def __init__(self, inferring: Task[InferResponse]) -> None:
        self._inferring: Task[InferResponse] | None = inferring

    def __aiter__(self) -> OneResponse:
        return self

    async def __anext__(self) -> InferResponse:
        inferring = self._inferring
        if inferring is None:
            raise StopAsyncIteration
        try:
            return await inferring
        except PenstockError as error:
            return InferResponse(None, error=error)
        finally:
            self._inferring = None

    def ready(self) -> InferResponse | None:
        return None

    def close(self) -> None:
        if self._inferring is not None:
            self._inferring.cancel()
            self._inferring = None
