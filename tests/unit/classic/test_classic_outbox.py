"""Responses from threads to the loop."""

from __future__ import annotations

import asyncio
import threading

from penstock.classic.batching.batch import QueuedCall, UnaryCall
from penstock.classic.batching.responses import Outbox
from penstock.classic.messages import InferResponse
from support.classic import request, until


async def test_every_response_arrives_in_order_and_wakes_an_idle_loop() -> None:
    loop = asyncio.get_running_loop()
    received: list[tuple[QueuedCall, InferResponse]] = []
    outbox = Outbox(loop, lambda call, response: received.append((call, response)))
    calls = [UnaryCall(request(), size, loop.create_future()) for size in (1, 2)]
    posted = [(call, InferResponse(None)) for call in calls for _ in range(100)]

    def post(part: list[tuple[QueuedCall, InferResponse]]) -> None:
        for call, response in part:
            outbox.post(call, response)

    # Each thread begins when the loop has seen all of the one before, so each has to wake it again.
    for start in (0, 100):
        threading.Thread(target=post, args=(posted[start : start + 100],)).start()
        await until(lambda: len(received) == start + 100)  # noqa: B023
    assert received == posted


async def test_on_the_loop_there_is_no_detour() -> None:
    loop = asyncio.get_running_loop()
    received: list[InferResponse] = []
    outbox = Outbox(loop, lambda call, response: received.append(response))
    response = InferResponse(None)
    outbox.post(UnaryCall(request(), 1, loop.create_future()), response)
    assert received == [response]


def test_a_closed_loop_is_nobody_to_tell() -> None:
    loop = asyncio.new_event_loop()
    outbox = Outbox(loop, lambda call, response: None)
    call = UnaryCall(request(), 1, loop.create_future())
    loop.close()
    thread = threading.Thread(target=outbox.post, args=(call, InferResponse(None)))
    raised: list[object] = []
    threading_hook, threading.excepthook = threading.excepthook, raised.append
    try:
        thread.start()
        thread.join()
    finally:
        threading.excepthook = threading_hook
    assert raised == []
