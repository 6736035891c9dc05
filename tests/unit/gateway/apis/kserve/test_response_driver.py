"""Responses on a stream: all of them, in order, whether they are written at once or by the request's task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock.classic.batching.batch import QueuedCall
from penstock.classic.batching.responses import CallStream
from penstock.classic.messages import InferResponse
from penstock.engines.errors import EngineError
from penstock.gateway.apis.kserve.grpc.infer import ResponseDriver


def numbered(number: int, *, final: bool = False, error: bool = False) -> InferResponse:
    return InferResponse([], {"number": number}, EngineError("broken") if error else None, final)


class Reader:
    """A task that reads a stream as a request on a ModelStreamInfer does."""

    def __init__(self, takes: Callable[[InferResponse], bool] = lambda _: True) -> None:
        self.cancelled: list[QueuedCall] = []
        self.stream = CallStream(asyncio.get_running_loop(), self.cancelled.append)
        self.written: list[object] = []
        self.by_task: list[object] = []
        self._takes = takes
        self.task = asyncio.ensure_future(self._read())

    def _write(self, response: InferResponse) -> bool:
        if response.final or response.error is not None or not self._takes(response):
            return False
        self.written.append(response.parameters["number"])
        return True

    async def _read(self) -> None:
        async for response in ResponseDriver(self.stream, self._write):
            self.by_task.append(response.parameters["number"])
            self.written.append(response.parameters["number"])
            if response.final:
                return

    async def end(self) -> None:
        async with asyncio.timeout(10):
            await self.task

    async def put(self, *responses: InferResponse, turns: int = 3) -> None:
        for response in responses:
            self.stream.put(response)
        for _ in range(turns):
            await asyncio.sleep(0)


async def test_only_the_first_and_the_last_need_the_task() -> None:
    reader = Reader()
    await reader.put(numbered(0))
    await reader.put(numbered(1), numbered(2), turns=0)
    assert reader.written == [0, 1, 2], "at once"
    await reader.put(numbered(3), numbered(4, final=True))
    await reader.end()
    assert reader.written == [0, 1, 2, 3, 4]
    assert reader.by_task == [0, 4]


async def test_what_comes_before_the_task_listens_is_pushed_too() -> None:
    reader = Reader()
    await reader.put(*map(numbered, range(5)))
    assert reader.written == [0, 1, 2, 3, 4]
    assert reader.by_task == [0]
    reader.task.cancel()


@pytest.mark.parametrize("refused", [{1}, {1, 2}, {3}, {1, 2, 3, 4, 5}])
async def test_what_cannot_be_written_at_once_waits_in_order(refused: set[int]) -> None:
    reader = Reader(lambda response: response.parameters["number"] not in refused)
    await reader.put(*map(numbered, range(6)), turns=30)
    assert reader.written == [0, 1, 2, 3, 4, 5]
    assert reader.by_task == [0, *sorted(refused)]
    await reader.put(numbered(6, final=True))
    await reader.end()


async def test_a_stream_that_can_only_be_iterated_is_written_in_the_same_way() -> None:
    reader = Reader(lambda response: response.parameters["number"] != 2)
    reader.stream.pushes = False
    await reader.put(*map(numbered, range(4)), numbered(4, final=True), turns=30)
    await reader.end()
    assert (reader.written, reader.by_task) == ([0, 1, 2, 3, 4], [0, 2, 4])


async def test_errors_go_to_the_task() -> None:
    reader = Reader()
    await reader.put(numbered(0), numbered(1, error=True), numbered(2), numbered(3, final=True), turns=10)
    await reader.end()
    assert (reader.written, reader.by_task) == ([0, 1, 2, 3], [0, 1, 3])


async def test_what_cannot_be_written_at_all_ends_the_task() -> None:
    def raises(response: InferResponse) -> bool:
        raise ValueError("no such text")

    reader = Reader(raises)
    await reader.put(numbered(0), numbered(1), turns=5)
    with pytest.raises(ValueError, match="no such text"):
        await reader.end()
    await reader.put(numbered(2))
    assert reader.written == [0]


async def test_a_task_that_is_cancelled_listens_no_more() -> None:
    reader = Reader()
    await reader.put(numbered(0))
    reader.task.cancel()
    await reader.put(numbered(1), numbered(2, final=True))
    assert reader.written == [0]
    with pytest.raises(asyncio.CancelledError):
        await reader.end()
