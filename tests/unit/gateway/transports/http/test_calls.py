"""Clients that leave, and drains that expire: whatever runs is closed at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.gateway.requests.call import DrainState
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import FakeDataPlane, delta

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "tiny", "prompt": "hi"},
}
CASES = [(path, stream) for path in BODIES for stream in (False, True)]


class Running:
    """A call that has got its first delta and now waits for the next, which never comes."""

    def __init__(self, path: str = "/v1/completions", stream: bool = True) -> None:
        self.drain = DrainState()
        self.dataplane = FakeDataPlane(lambda _: [[delta(0, "a")], asyncio.Event()])
        self.app = build_app(self.dataplane, AppSettings(drain=self.drain))
        self.call = AsgiCall(self.app, path, {**BODIES[path], "stream": stream})
        self.task = asyncio.create_task(self.call.run())

    async def at_second_delta(self) -> Running:
        await self.dataplane.generating.wait()
        await self.dataplane.generations[0].waiting.wait()
        return self


@pytest.mark.parametrize(("path", "stream"), CASES)
async def test_disconnect_closes_the_generation(path: str, stream: bool) -> None:
    running = await Running(path, stream).at_second_delta()
    assert running.drain.in_flight == 1
    running.call.disconnect()
    await running.task
    assert running.dataplane.generations[0].closed.is_set()
    assert running.drain.in_flight == 0
    assert running.call.complete is False


@pytest.mark.parametrize(("path", "stream"), CASES)
async def test_disconnect_cancels_a_call_that_still_queues(path: str, stream: bool) -> None:
    dataplane = FakeDataPlane()
    dataplane.admit = asyncio.Event()
    request = AsgiCall(build_app(dataplane, AppSettings()), path, {**BODIES[path], "stream": stream})
    task = asyncio.create_task(request.run())
    await dataplane.generating.wait()
    request.disconnect()
    await task
    assert dataplane.cancelled.is_set()
    assert request.messages == []


@pytest.mark.parametrize(("path", "stream"), CASES)
async def test_a_call_that_ends_leaves_nothing_behind(path: str, stream: bool) -> None:
    drain = DrainState()
    dataplane = FakeDataPlane()
    before = asyncio.all_tasks()
    result = await call(build_app(dataplane, AppSettings(drain=drain)), path, {**BODIES[path], "stream": stream})
    assert result.complete
    assert dataplane.generations[0].closed.is_set()
    assert drain.in_flight == 0
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_cancellation_from_outside_is_passed_on() -> None:
    running = await Running().at_second_delta()
    running.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running.task
    assert running.dataplane.generations[0].closed.is_set()
    assert running.drain.in_flight == 0


async def test_draining_refuses_new_work_and_lets_the_rest_run() -> None:
    running = await Running().at_second_delta()
    running.drain.begin()
    refused = await call(running.app, "/v1/completions", BODIES["/v1/completions"])
    assert refused.status == 503
    assert refused.headers["connection"] == "close"
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "not_ready"
    assert not running.task.done()
    assert await running.drain.wait_idle(0.01) is False
    running.call.disconnect()
    await running.task
    assert await running.drain.wait_idle() is True


async def test_expiry_ends_streams_with_an_error_event() -> None:
    running = await Running().at_second_delta()
    running.drain.expire()
    await running.task
    *_, failure, done = running.call.events()
    assert failure["error"]["code"] == "not_ready"
    assert done == "[DONE]"
    assert running.call.complete
    assert running.dataplane.generations[0].closed.is_set()


async def test_expiry_answers_whole_calls_with_503() -> None:
    running = await Running(stream=False).at_second_delta()
    running.drain.expire()
    await running.task
    assert running.call.status == 503
    assert running.call.headers["connection"] == "close"


async def test_client_that_leaves_after_expiry_is_harmless() -> None:
    running = await Running().at_second_delta()
    running.drain.expire()
    running.drain.expire()
    running.call.disconnect()
    await running.task
    assert running.drain.in_flight == 0


async def test_the_task_of_a_client_that_left_can_go_on() -> None:
    dataplane = FakeDataPlane(lambda _: [[delta(0, "a")], asyncio.Event()])
    body = {**BODIES["/v1/completions"], "stream": True}
    request = AsgiCall(build_app(dataplane, AppSettings()), "/v1/completions", body)

    async def server_task() -> int:
        await request.run()
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    task = asyncio.create_task(server_task())
    await dataplane.generating.wait()
    await dataplane.generations[0].waiting.wait()
    request.disconnect()
    assert await task == 0
