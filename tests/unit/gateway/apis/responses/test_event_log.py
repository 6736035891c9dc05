"""The events that a response in the background has had: what is kept of them, and who reads on from where."""

from __future__ import annotations

import asyncio

import pytest

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.generating.event_log import EventLog
from penstock.gateway.generating.streams import COMMENT


def event(number: int) -> bytes:
    return b'event: e\ndata: {"n":%d}\n\n' % number


def add(log: EventLog, *numbers: int) -> None:
    log.add(b"".join(map(event, numbers)), numbers[-1] + 1)


async def read(log: EventLog, after: int, heartbeat: float | None = None) -> bytes:
    return b"".join([frames async for frames in log.follow(after, heartbeat)])


@pytest.mark.parametrize("after", range(-1, 6))
async def test_a_reader_goes_on_behind_any_event(after: int) -> None:
    log = EventLog(10_000, "starting_after")
    add(log, 0, 1, 2)
    add(log, 3)
    add(log, 4, 5)
    log.end()
    assert await read(log, after) == b"".join(map(event, range(after + 1, 6)))


async def test_readers_follow_what_comes() -> None:
    log = EventLog(10_000, "starting_after")
    add(log, 0)
    readers = [asyncio.ensure_future(read(log, after)) for after in (-1, 0)]
    for number in (1, 2):
        await asyncio.sleep(0)
        add(log, number)
    await asyncio.sleep(0)
    log.end()
    assert await asyncio.gather(*readers) == [event(0) + event(1) + event(2), event(1) + event(2)]


async def test_in_silence_a_reader_gets_comments() -> None:
    log = EventLog(10_000, "starting_after")
    add(log, 0)
    frames = log.follow(0, 0.001)
    assert await anext(frames) == COMMENT
    add(log, 1)
    while (found := await anext(frames)) == COMMENT:
        pass
    assert found == event(1)


async def test_the_oldest_events_go_and_readers_that_need_them_are_told() -> None:
    log = EventLog(3 * len(event(0)), "starting_after")
    for number in range(6):
        add(log, number)
    assert log.bytes == 3 * len(event(0))
    log.check(2)
    with pytest.raises(InvalidRequestError, match="before number 3"):
        log.check(1)
    with pytest.raises(InvalidRequestError, match="before number 3"):
        await read(log, -1)
    log.end()
    assert await read(log, 2) == event(3) + event(4) + event(5)


def test_an_event_that_never_was_is_refused() -> None:
    log = EventLog(10_000, "starting_after")
    add(log, 0, 1)
    log.check(1)
    with pytest.raises(InvalidRequestError, match="last event has number 1"):
        log.check(2)


def test_the_newest_events_stay_however_large_they_are() -> None:
    log = EventLog(10, "starting_after")
    add(log, 0, 1)
    log.check(-1)
