"""A long stream must not make others wait when it ends."""

from __future__ import annotations

import pytest

from penstock.loadtest.clients.framing import Chunks
from penstock.loadtest.clients.openai import CompletionsClient
from penstock.loadtest.messages import Answer
from unit.loadtest.clients.wires import CALL, CHUNKED_HEAD, LAST_CHUNK, OPTIONS, ByHand, chunk, event

READS = [
    CHUNKED_HEAD,
    *(chunk(event(choices=[{"index": 0, "text": "x", "finish_reason": None}])) for _ in range(400)),
    chunk(event(choices=[{"index": 0, "text": "", "finish_reason": "length"}])),
    chunk(b"data: [DONE]\n\n") + LAST_CHUNK,
]


async def test_chunks_are_looked_for_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    feed = Chunks.feed

    def counting(self: Chunks, data: bytes) -> bool:
        fed.append(len(data))
        return feed(self, data)

    monkeypatch.setattr(Chunks, "feed", counting)
    raw = await ByHand(READS).exchange(b"")
    assert sum(fed) == sum(map(len, READS)) - len(CHUNKED_HEAD)
    assert max(fed) < 32 * len(READS[1]), "at no time much of it at once"
    assert raw.chunks is not None
    assert len(raw.chunks.spans) == 402


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
