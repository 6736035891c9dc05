"""Attempts at one server, until the first byte of its answer or its failure, and the answers that have begun."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engines.errors import AuthenticationError, InvalidRequestError, PenstockError
from penstock.gateway.errors import UpstreamError, UpstreamTimeoutError, UpstreamUnavailableError
from penstock.gateway.models.language.adapters import CallCounter
from penstock.gateway.models.upstream.answer_reading import AnswerReader
from penstock.gateway.models.upstream.failures import (
    AttemptFailed,
    Redactor,
    broken_answer,
    failed_answer,
    retry_seconds,
)
from penstock.gateway.models.upstream.server import UpstreamServer
from penstock.gateway.transports.http.http_connection import BrokenAnswer, CannotConnect, HttpConnection

logger = logging.getLogger("penstock")

_MOST_ERROR = 64 << 10
"""Bytes of an error's body that are read."""
_WHOLE = "200"
_MOST_REST = 60.0
"""Seconds for which a server that said so with 429 is left alone, at most."""


@dataclass(frozen=True, slots=True)
class Question:
    """What every attempt for a request sends."""

    model: str
    """The public name."""
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    streams: bool
    seconds: float
    """Until the first byte."""
    redact: Redactor
    prefix: Sequence[int] = ()
    """The prompt's tokens, or about as many numbers of its text; equal where prompts are."""
    has_tokens: bool = False
    session: str = ""
    own_key: bool = True
    """All requests show the server the same key: what it says of that key holds for all of them."""


class OpenAnswer:
    """An answer that has begun, with status 200. To be ended once."""

    def __init__(self, server: UpstreamServer, connection: HttpConnection, first: bytes) -> None:
        self.server = server
        self.connection = connection
        self.first = first
        """The first piece of a stream."""
        self._ended = False

    def end(self, kind: str, *, well: bool | None = None) -> None:
        """Idempotent. `kind` is a label of metrics: "200" for an answer that is whole. `well`: what that says about the
        server; None: nothing."""
        if self._ended:
            return
        self._ended = True
        if kind == _WHOLE:
            self.server.pool.give_back_at_end(self.connection)
        else:
            self.server.pool.give_back(self.connection)
        self.server.in_flight -= 1
        self.server.ended[kind] += 1
        if well or kind == _WHOLE:
            self.server.health.answered()
        elif well is not None:
            self.server.health.failed(asyncio.get_running_loop().time())


async def attempt(server: UpstreamServer, question: Question) -> OpenAnswer:
    """Raises AttemptFailed."""
    loop = asyncio.get_running_loop()
    is_trial = not server.health.healthy
    server.in_flight += 1
    server.trials += is_trial
    began = loop.time()
    try:
        connection, first = await _first_byte(server, question)
    except AttemptFailed as failure:
        server.in_flight -= 1
        server.ended[failure.kind] += 1
        _judge(server, failure, question, loop.time())
        if failure.unhealthy or isinstance(failure.error, UpstreamError):
            logger.warning("upstream %s at %s: %s", question.model, server.label, failure.error.message)
        raise
    except BaseException:
        server.in_flight -= 1
        server.ended["cancelled"] += 1
        raise
    finally:
        server.trials -= is_trial
    server.first_byte.observe(loop.time() - began)
    server.health.began()
    return OpenAnswer(server, connection, first)


def _judge(server: UpstreamServer, failure: AttemptFailed, question: Question, now: float) -> None:
    if failure.unhealthy:
        server.health.failed(now)
    else:
        server.health.answered()
        if question.own_key and failure.kind == "429" and failure.retry_after is not None:
            server.health.rests(now + min(failure.retry_after, _MOST_REST))


async def _first_byte(server: UpstreamServer, question: Question) -> tuple[HttpConnection, bytes]:
    who = f"The server behind `{question.model}`"
    try:
        async with asyncio.timeout(question.seconds):
            connection = await server.pool.ask(server.request("POST", question.path, question.headers, question.body))
            try:
                await _check_head(connection, question)
                first = await connection.chunk() if question.streams else b""
            except BaseException:
                server.pool.give_back(connection)
                raise
            return connection, first
    except TimeoutError:
        error = UpstreamTimeoutError(f"{who} did not answer within {question.seconds:g} seconds.")
        raise AttemptFailed(error, "timeout", again=False) from None
    except CannotConnect as reason:
        down = UpstreamUnavailableError(f"{who} is not there: {reason}.", retry_after=1)
        raise AttemptFailed(down, "no_connection") from None
    except BrokenAnswer as reason:
        raise AttemptFailed(broken_answer(question.model, str(reason)), "broken") from None


async def _check_head(connection: HttpConnection, question: Question) -> None:
    """Raises AttemptFailed for everything but the beginning of the answer that was asked for."""
    if connection.status in (401, 403) and not question.own_key:
        refusal = AuthenticationError(f"The server behind `{question.model}` does not accept your key.")
        raise AttemptFailed(refusal, str(connection.status), again=False, unhealthy=False)
    if connection.status != 200:
        retry_after = retry_seconds(connection.headers.get(b"retry-after"))
        try:
            body = await connection.read(_MOST_ERROR)
        except BrokenAnswer:
            body = b""
        raise failed_answer(question.model, connection.status, retry_after, body, question.redact)
    encoding = connection.headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"", b"identity"):
        error = broken_answer(question.model, "it is compressed, which was not asked for")
        raise AttemptFailed(error, "broken", again=False)
    kind = connection.headers.get(b"content-type", b"").lower()
    if question.streams and kind.startswith(b"application/json"):
        raise AttemptFailed(broken_answer(question.model, "it does not stream"), "broken", again=False)


class CountedAnswer:
    """A model's answer that has begun: counted until its end."""

    def __init__(self, answer: OpenAnswer, reader: AnswerReader, calls: CallCounter, tokens: Counter[str]) -> None:
        """`calls` and `tokens` are the model's."""
        self.answer = answer
        self.reader = reader
        self._calls = calls
        self._tokens = tokens
        self._ended = False

    def failed(self, error: PenstockError) -> None:
        """What it says, or does not say, is an error."""
        if isinstance(error, UpstreamError):
            well: bool | None = False
        else:
            well = True if isinstance(error, InvalidRequestError) else None
        self.answer.end(error.code, well=well)

    def end(self) -> None:
        """Idempotent. What is not complete is given up."""
        if not self._ended:
            self._ended = True
            self.answer.end("cancelled")
            self.reader.held.note(0)
            self._calls.end()
            self._tokens["prompt"] += self.reader.usage.prompt_tokens
            self._tokens["completion"] += self.reader.usage.completion_tokens
