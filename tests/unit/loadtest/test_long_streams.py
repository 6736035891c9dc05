"""A long stream must not make others wait when it ends."""

from __future__ import annotations

import pytest

from penstock.loadtest.clients.openai import CompletionsClient
from penstock.loadtest.messages import Answer
from unit.loadtest.clients.wires import CALL, CHUNKED_HEAD, LAST_CHUNK, OPTIONS, ByHand, chunk, event

READS = [
    CHUNKED_HEAD,
    *(chunk(event(choices=[{"index": 0, "text": "x", "finish_reason": None}])) for _ in range(400)),
    chunk(event(choices=[{"index": 0, "text": "", "finish_reason": "length"}])),
    chunk(b"data: [DONE]\n\n") + LAST_CHUNK,
]


@pytest.mark.parametrize("defer", [False, True])
async def test_events_are_looked_for_when_there_is_time(defer: bool) -> None:
    client = CompletionsClient(OPTIONS.__class__(url=OPTIONS.url, model="m", defer=defer), chat=False)
    client.pool = ByHand(READS)  # type: ignore[assignment]
    answer: Answer = await client.send(CALL)
    assert (answer.reads, answer.ended) == (403, 403.0)
    assert (answer.arrivals == []) is defer
    answer.complete()
    assert len(answer.arrivals) == 400
    assert (answer.error, answer.finish_reason) == ("", "length")
    answer.complete()
    assert len(answer.arrivals) == 400, "once is enough"
