"""Responses that are ready together are taken together, and each one once."""

from __future__ import annotations

import asyncio

import pytest

from penstock.engines.classic.messages import InferResponse
from penstock.gateway.kserve.ready import MAX_TOGETHER, ReadyResponses


class Mailbox:
    """A stream that is fed by hand. Its reader waits for a future, as those of our models do."""

    def __init__(self) -> None:
        self.unread: list[InferResponse] = []
        self.ended = False
        self.closed = 0
        self.reader: asyncio.Future[None] | None = None

    def put(self, *numbers: int, final: bool = False) -> None:
        self.unread += (InferResponse(None, {"n": number}, final=False) for number in numbers)
        if final:
            self.unread[-1].final = True
            self.ended = True
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)

    def __aiter__(self) -> Mailbox:
        return self

    async def __anext__(self) -> InferResponse:
        while not self.unread:
            if self.ended:
                raise StopAsyncIteration
            self.reader = asyncio.get_running_loop().create_future()
            try:
                await self.reader
            finally:
                self.reader = None
        return self.unread.pop(0)

    def close(self) -> None:
        self.closed += 1


def numbers(batch: list[InferResponse]) -> list[object]:
    return [response.parameters["n"] for response in batch]


async def test_what_is_there_is_taken_together() -> None:
    mailbox = Mailbox()
    ready = ReadyResponses(mailbox)
    mailbox.put(1, 2, 3)
    assert numbers(await anext(ready)) == [1, 2, 3]
    mailbox.put(4)
    assert numbers(await anext(ready)) == [4]
    mailbox.put(5, 6, final=True)
    assert numbers(await anext(ready)) == [5, 6]
    with pytest.raises(StopAsyncIteration):
        await anext(ready)


async def test_what_is_not_there_is_waited_for() -> None:
    mailbox = Mailbox()
    ready = ReadyResponses(mailbox)
    first = asyncio.create_task(anext(ready))
    await asyncio.sleep(0)
    assert not first.done()
    mailbox.put(1)
    assert numbers(await first) == [1]
    mailbox.put(2, 3)  # while nobody waits, but a wait has begun
    assert numbers(await anext(ready)) == [2, 3]
    second = asyncio.create_task(anext(ready))
    await asyncio.sleep(0)
    mailbox.put(4, final=True)
    assert numbers(await second) == [4]


async def test_a_stream_may_end_without_a_final_response() -> None:
    mailbox = Mailbox()
    ready = ReadyResponses(mailbox)
    mailbox.put(1)
    mailbox.ended = True
    assert numbers(await anext(ready)) == [1]
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await anext(ready)


async def test_a_model_that_never_waits_does_not_keep_the_loop() -> None:
    mailbox = Mailbox()
    mailbox.put(*range(MAX_TOGETHER * 2 + 1))
    ready = ReadyResponses(mailbox)
    assert len(await anext(ready)) == MAX_TOGETHER
    assert len(await anext(ready)) == MAX_TOGETHER
    assert len(await anext(ready)) == 1


async def test_cancelled_while_it_waits() -> None:
    mailbox = Mailbox()
    ready = ReadyResponses(mailbox)
    mailbox.put(1)
    await anext(ready)
    waiting = asyncio.create_task(anext(ready))
    await asyncio.sleep(0)
    assert mailbox.reader is not None
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert mailbox.reader is None
    ready.close()
    assert mailbox.closed == 1


async def test_closed_while_a_wait_is_put_aside() -> None:
    mailbox = Mailbox()
    ready = ReadyResponses(mailbox)
    mailbox.put(1)
    await anext(ready)
    assert mailbox.reader is not None
    ready.close()
    assert mailbox.reader is None
    assert mailbox.closed == 1
    with pytest.raises(StopAsyncIteration):
        await anext(ready)


@pytest.mark.parametrize("waits", [True, False])
async def test_errors_of_the_stream_come_after_what_was_there(waits: bool) -> None:
    class Broken(Mailbox):
        async def __anext__(self) -> InferResponse:
            if self.unread:
                return self.unread.pop(0)
            if waits:
                await asyncio.sleep(0)
            raise ValueError("broken")

    mailbox = Broken()
    mailbox.put(1)
    ready = ReadyResponses(mailbox)
    assert numbers(await anext(ready)) == [1]
    with pytest.raises(ValueError, match="broken"):
        await anext(ready)
