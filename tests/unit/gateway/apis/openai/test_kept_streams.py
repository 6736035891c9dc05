"""Streams that clients may take up again: how many are kept, and what the journal is told of each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from penstock.gateway.apis.usage.ledger import usage_of
from penstock.gateway.generating import resumable_streams
from penstock.gateway.models.language.dataplane import GenerateRequest, ServedModel
from penstock.gateway.requests.access import ApiKeys, key_digest
from penstock.gateway.requests.call import RequestJournal
from penstock.gateway.requests.context import Principal, RequestContext
from penstock.gateway.requests.quota import Limits, Quota
from penstock.gateway.server.ports.http_apps import App, build_app
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import FakeDataPlane, Step, delta

BODY = {"model": "tiny", "prompt": "hi", "stream": True}
KEY = {"authorization": "Bearer k"}


async def streamed(app: App, last: str | None = None) -> AsgiCall:
    return await call(app, "/v1/completions", BODY, headers=None if last is None else {"last-event-id": last})


def first_id(answer: AsgiCall) -> str:
    [first, *_] = b"".join(answer.bodies).decode().splitlines()
    return first.removeprefix("id: ")


async def test_the_oldest_of_too_many_that_have_ended_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_streams, "_MOST_ENDED", 2)
    app = build_app(FakeDataPlane(), AppSettings(resumable_streams=60))
    ids = [first_id(await streamed(app)) for _ in range(3)]
    assert [(await streamed(app, last)).status for last in ids] == [404, 200, 200]


async def test_those_that_have_ended_are_forgotten_when_they_take_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_streams, "_ENDED_BYTES", 1)
    app = build_app(FakeDataPlane(), AppSettings(resumable_streams=60))
    assert (await streamed(app, first_id(await streamed(app)))).status == 404


async def test_more_than_may_be_made_at_a_time_are_streams_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_streams, "_MOST_STREAMS", 0)
    app = build_app(FakeDataPlane(), AppSettings(resumable_streams=60))
    assert b"id: " not in b"".join((await streamed(app)).bodies)


class Naming(FakeDataPlane):
    def model(self, name: str, context: RequestContext | None = None) -> ServedModel:
        if context is not None:
            context.record.model = name
        return super().model(name, context)


async def test_a_stream_is_one_request_of_its_key_however_often_it_is_read() -> None:
    ended: list[RequestContext] = []
    app = build_app(Naming(), AppSettings(resumable_streams=60, journal=RequestJournal([ended.append])))
    await streamed(app, first_id(await streamed(app)))
    assert len(ended) == 3
    assert [found.model for found in map(usage_of, ended) if found is not None] == ["tiny"]


async def test_who_reads_on_shares_the_place_of_the_work_and_nobody_else_does() -> None:
    """A key for one request at a time: its client has lost the connection, and comes back."""
    going_on = asyncio.Event()

    def script(request: GenerateRequest) -> Iterator[Step]:
        yield [delta(0, "one")]
        yield going_on
        yield [delta(0, " two", "stop")]

    quota = Quota(Limits(concurrent_requests=1, requests_per_minute=10), clock=lambda: 0.0)
    keys = ApiKeys({key_digest(b"k"): Principal(tenant="t", key="k", quota=quota)})
    app = build_app(FakeDataPlane(script), AppSettings(resumable_streams=60, keys=keys))
    asked = AsgiCall(app, "/v1/completions", BODY, headers=KEY)
    asking = asyncio.create_task(asked.run())
    while len(asked.messages) < 2:
        await asyncio.sleep(0)
    asked.disconnect()
    await asking
    last = {"last-event-id": first_id(asked)}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    assert (await call(app, "/v1/completions", BODY, headers=KEY)).status == 429
    assert (await call(app, "/v1/completions", BODY | {"prompt": "ho"}, headers=KEY | last)).status == 429
    assert (await call(app, "/v1/completions", BODY | {"stream": False}, headers=KEY | last)).status == 429
    assert (await call(app, "/v1/chat/completions", chat, headers=KEY | last)).status == 429
    again = AsgiCall(app, "/v1/completions", BODY, headers=KEY | last)
    reading = asyncio.create_task(again.run())
    while not again.messages:
        await asyncio.sleep(0)
    going_on.set()
    await reading
    assert again.status == 200
    assert b" two" in b"".join(again.bodies)
    assert (quota.in_flight, dict(quota.headers())[b"x-ratelimit-remaining-requests"]) == (0, b"8")
