"""What the official client makes of overload, of errors amid a stream, and what the server does when it leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from penstock.engines.errors import EngineDeadError, QueueFullError
from protocol.conftest import Serve, ServerThread
from protocol.fake_dataplane import FakeDataPlane, delta

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def client_of(server: ServerThread, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", **{"max_retries": 0, **options})


def test_overload_is_503_with_retry_after(serve: Serve) -> None:
    dataplane = FakeDataPlane()
    dataplane.admit = QueueFullError("The queue is full.", retry_after=1.5)
    with client_of(serve(dataplane)) as client, pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "2"
    assert caught.value.code == "queue_full"


def test_client_retries_until_there_is_room(serve: Serve) -> None:
    class Crowded(FakeDataPlane):
        async def generate(self, request: Any) -> Any:
            self.admit = QueueFullError("full", retry_after=0.1) if len(self.requests) < 1 else None
            return await super().generate(request)

    with client_of(serve(Crowded()), max_retries=1) as client:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.choices[0].message.content == "one two three"


def test_error_amid_a_stream_is_raised(serve: Serve) -> None:
    dataplane = FakeDataPlane(lambda _: [[delta(0, "a")], EngineDeadError("The engine died.")])
    got: list[str | None] = []
    with client_of(serve(dataplane)) as client:
        stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError) as caught:
            got.extend(chunk.choices[0].delta.content for chunk in stream)
    assert got == ["", "a"]
    assert caught.value.message == "The engine died."
    assert caught.value.code == "engine_dead"


def hanging() -> FakeDataPlane:
    return FakeDataPlane(lambda _: [[delta(0, "a")], asyncio.Event()])


def test_leaving_a_stream_closes_the_generation(serve: Serve) -> None:
    dataplane = hanging()
    server = serve(dataplane)
    with client_of(server) as client:
        stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        assert next(iter(stream)).choices[0].delta.role == "assistant"
        stream.close()
        server.do(dataplane.generations[0].closed.wait())
    assert server.do(server.settings.drain.wait_idle(20))


def test_giving_up_on_an_answer_closes_the_generation(serve: Serve) -> None:
    dataplane = hanging()
    server = serve(dataplane)
    with client_of(server, timeout=1.0) as client, pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="tiny", messages=MESSAGES)
    server.do(dataplane.generating.wait())
    server.do(dataplane.generations[0].closed.wait())


def test_giving_up_in_the_queue_cancels_the_call(serve: Serve) -> None:
    dataplane = FakeDataPlane()
    dataplane.admit = asyncio.Event()
    server = serve(dataplane)
    with client_of(server, timeout=1.0) as client, pytest.raises(openai.APITimeoutError):
        client.completions.create(model="tiny", prompt="hi")
    server.do(dataplane.cancelled.wait())
    assert server.do(server.settings.drain.wait_idle(20))
