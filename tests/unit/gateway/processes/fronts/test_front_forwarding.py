"""What a front passes on of the supervisor's answers."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.types import Message

from penstock.gateway.processes.fronts.forwarding import _relay_answer
from penstock.gateway.processes.fronts.passing import BODY, END, MESSAGE, AnswerStart


class SaidPassage:
    def __init__(self, *said: tuple[int, Any]) -> None:
        self._said = list(said)

    async def receive(self) -> tuple[int, Any]:
        return self._said.pop(0)


async def relayed(headers: list[tuple[bytes, bytes]], *said: tuple[int, bytes]) -> list[tuple[bytes, bool]]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    answered = AnswerStart(status=200, headers=headers)
    passage: Any = SaidPassage((MESSAGE, answered), *said)
    await _relay_answer(passage, send)
    return [(message["body"], message["more_body"]) for message in sent[1:]]


@pytest.mark.parametrize("end", [b"", b"late"])
async def test_an_answer_is_over_with_its_last_byte(end: bytes) -> None:
    """Its client has it all then, and may send the next request before the supervisor says that this was the end."""
    headers = [(b"content-length", b"4")]
    assert await relayed(headers, (BODY, b"ab"), (BODY, b"cd"), (END, end)) == [(b"ab", True), (b"cd", False)]
    assert await relayed(headers, (BODY, b"ab"), (END, b"cd")) == [(b"ab", True), (b"cd", False)]


async def test_a_stream_is_over_when_the_supervisor_says_so() -> None:
    assert await relayed([], (BODY, b"ab"), (BODY, b"cd"), (END, b"")) == [(b"ab", True), (b"cd", True), (b"", False)]
