"""Responses that are ready together are taken together, and each one once."""

from __future__ import annotations

import asyncio

from penstock.classic.messages import InferResponse
from penstock.gateway.apis.kserve.generate import MAX_TOGETHER, next_together


class Mailbox:
    """A stream that is fed by hand."""

    def __init__(self) -> None:
        self.unread: list[InferResponse] = []
        self.ended = False
        self.fed = asyncio.Event()

    def put(self, *numbers: int, final: bool = False) -> None:
        self.unread += (InferResponse(None, {"n": number}, final=False) for number in numbers)
        if final:
            self.unread[-1].final = True
            self.ended = True
        self.fed.set()

    def __aiter__(self) -> Mailbox:
        return self

    async def __anext__(self) -> InferResponse:
        while not self.unread:
            if self.ended:
                raise StopAsyncIteration
            self.fed.clear()
            await self.fed.wait()
        return self.unread.pop(0)

    def ready(self) -> InferResponse | None:
        return self.unread.pop(0) if self.unread else None

    def close(self) -> None:
        self.unread.clear()


def numbers(batch: list[InferResponse]) -> list[object]:
    return [response.parameters["n"] for response in batch]


async def test_what_is_there_is_taken_together() -> None:
    mailbox = Mailbox()
    mailbox.put(1, 2, 3)
    assert numbers(await next_together(mailbox)) == [1, 2, 3]
    mailbox.put(4)
    assert numbers(await next_together(mailbox)) == [4]


async def test_the_first_one_is_waited_for() -> None:
    mailbox = Mailbox()
    waiting = asyncio.create_task(next_together(mailbox))
    await asyncio.sleep(0)
    assert not waiting.done()
    mailbox.put(1, 2)
    assert numbers(await waiting) == [1, 2]


async def test_nothing_is_taken_behind_the_final_one() -> None:
    mailbox = Mailbox()
    mailbox.put(1, 2, final=True)
    mailbox.put(3)
    assert numbers(await next_together(mailbox)) == [1, 2]


async def test_the_end_is_empty() -> None:
    mailbox = Mailbox()
    mailbox.ended = True
    assert await next_together(mailbox) == []


async def test_their_number_is_bounded() -> None:
    mailbox = Mailbox()
    mailbox.put(*range(MAX_TOGETHER + 1))
    assert len(await next_together(mailbox)) == MAX_TOGETHER
    assert len(await next_together(mailbox)) == 1
