"""Streams that clients may take up again: how many are kept, and what the journal is told of each."""

from __future__ import annotations

import pytest

from penstock.gateway.front.context import RequestContext
from penstock.gateway.front.journal import RequestJournal
from penstock.gateway.generating import resumable_streams
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.ports.http_apps import App, build_app
from penstock.gateway.usage.ledger import usage_of
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import FakeDataPlane

BODY = {"model": "tiny", "prompt": "hi", "stream": True}


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
    async def arrive(self, name: str, context: RequestContext) -> None:
        context.record.model = name


async def test_a_stream_is_one_request_of_its_key_however_often_it_is_read() -> None:
    ended: list[RequestContext] = []
    app = build_app(Naming(), AppSettings(resumable_streams=60, journal=RequestJournal([ended.append])))
    await streamed(app, first_id(await streamed(app)))
    assert len(ended) == 3
    assert [found.model for found in map(usage_of, ended) if found is not None] == ["tiny"]
