"""One line for each request: what it says, for whom it is written, and what must never be in it."""

from __future__ import annotations

import asyncio
import io
import json
import threading

import pytest

from penstock.engines.errors import (
    AuthenticationError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    PenstockError,
    QueueFullError,
)
from penstock.gateway.errors import HttpError
from penstock.gateway.models.language.generation import Usage
from penstock.gateway.requests import access_log
from penstock.gateway.requests.access_log import AccessLog
from penstock.gateway.requests.call import RequestJournal
from penstock.gateway.requests.context import Principal, RequestContext, read_context
from penstock.gateway.requests.record import Outcome


def ended(route: str = "/v1/completions", **fields: object) -> RequestContext:
    context = RequestContext(id="an-id", principal=Principal(tenant="team"))
    record = context.record
    record.method, record.route, record.status = "POST", route, "200"
    for name, value in fields.items():
        setattr(record, name, value)
    return context


async def lines(*contexts: RequestContext, **options: object) -> list[str]:
    out = io.StringIO()
    log = AccessLog(out, **options)  # type: ignore[arg-type]
    for context in contexts:
        log(context)
    log.flush()
    return out.getvalue().splitlines()


async def test_a_line_has_what_an_operator_asks_for() -> None:
    context = ended(usage=Usage(12, 34, 5), queue_seconds=0.25, model="m", bytes_in=70, bytes_out=800)
    context.record.first_token_at = context.arrival + 0.5
    [line] = await lines(context)
    expected = "POST /v1/completions 200 ok model=m tenant=team tokens=12+34 cached=5 queue=0.250s ttft=0.500s total="
    assert f" ACCESS  {expected}" in line
    assert line.endswith(" in=70 out=800 id=an-id")


async def test_a_line_has_the_version_of_http() -> None:
    context = ended(http_version="2")
    assert " http=2 " in (await lines(context))[0]
    assert json.loads((await lines(context, form="json"))[0])["http_version"] == "2"


async def test_json_has_the_same_as_fields() -> None:
    context = ended(usage=Usage(12, 34, 5), model="m")
    context.record.first_token_at = context.arrival + 0.5
    context.record.failed(QueueFullError("full"))
    [line] = await lines(context, form="json")
    fields = json.loads(line)
    assert {"id": "an-id", "tenant": "team", "outcome": "refused", "reason": "queue_full"}.items() <= fields.items()
    assert (fields["prompt_tokens"], fields["completion_tokens"], fields["ttft_s"]) == (12, 34, 0.5)


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (InvalidRequestError("x"), Outcome.CLIENT_ERROR, "invalid_request"),
        (HttpError(413, "x", code="too_large"), Outcome.CLIENT_ERROR, "too_large"),
        (HttpError(405, "x"), Outcome.CLIENT_ERROR, "405"),
        (AuthenticationError("x"), Outcome.DENIED, "invalid_api_key"),
        (QueueFullError("x"), Outcome.REFUSED, "queue_full"),
        (DeadlineExceededError("x"), Outcome.DEADLINE, "deadline_exceeded"),
        (EngineError("x"), Outcome.SERVER_ERROR, "engine_error"),
        (PenstockError("x"), Outcome.SERVER_ERROR, "internal_error"),
        (ValueError("x"), Outcome.SERVER_ERROR, "internal_error"),
    ],
)
def test_errors_are_told_apart(error: Exception, outcome: Outcome, reason: str) -> None:
    context = ended()
    context.record.failed(error)
    context.record.failed(EngineError("what followed"))
    context.record.cancelled()
    assert (context.record.outcome, context.record.reason) == (outcome, reason)


async def test_only_good_requests_are_sampled() -> None:
    failed = ended()
    failed.record.failed(EngineError("x"))
    chances = iter([0.05, 0.5])
    written = await lines(ended(), failed, ended(), sample=0.1, chance=lambda: next(chances))
    assert ["engine_error" in line for line in written] == [False, True]


async def test_only_slow_requests_when_asked_for() -> None:
    slow = ended("/slow")
    slow.arrival -= 5
    assert [" /slow " in line for line in await lines(ended(), slow, slow_s=2.0)] == [True]


async def test_probes_have_a_line_only_when_they_fail() -> None:
    failed = ended("/health/ready")
    failed.record.failed(EngineError("x"))
    assert len(await lines(ended("/metrics"), ended("/health/live"), failed)) == 1


async def test_a_client_cannot_write_lines_of_its_own() -> None:
    context = read_context({b"x-request-id": b"x\n2026 ACCESS  GET / 200 ok\x1b[31m"})
    [line] = await lines(context)
    assert "id=x2026ACCESSGET/200ok31m" in line
    assert "\x1b" not in line


class SlowReader(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.begun, self.reads = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.begun.set()
        assert self.reads.wait(20)
        return super().write(text)


@pytest.mark.parametrize("most", [10, 1])
async def test_what_reads_the_log_slowly_holds_up_no_request(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Until very many lines wait."""
    monkeypatch.setattr(access_log, "_FLUSH_SECONDS", 0)
    monkeypatch.setattr(access_log, "_MOST_LINES", most)
    out = SlowReader()
    log = AccessLog(out)
    log(ended("/first"))
    assert await asyncio.to_thread(out.begun.wait, 20)
    log(ended("/second"))
    if most == 1:
        out.reads.set()
    for _ in range(3):
        await asyncio.sleep(0)
    out.reads.set()
    log.flush()
    assert [" /first " in line for line in out.getvalue().splitlines()] == [True, False]


async def test_a_log_that_nobody_reads_any_more_is_no_error() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    log = AccessLog(Broken())
    log(ended())
    log.flush()


def test_every_request_ends_once() -> None:
    told: list[RequestContext] = []
    journal = RequestJournal([told.append])
    first, second = RequestContext(), RequestContext()
    journal.begin(first)
    journal.begin(second)
    assert journal.in_flight() == (first, second)
    journal.end(first)
    journal.end(first)
    assert (told, journal.in_flight()) == ([first], (second,))
