"""The base of clients over HTTP: sending, failing, and telling an error from an answer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from functools import partial
from time import perf_counter
from typing import Any

import msgspec

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.http1 import ConnectionLostError, ConnectionPool, head
from penstock.loadtest.clients.response import HttpResponse, MalformedError
from penstock.loadtest.errors import CONNECT, MALFORMED, TIMEOUT, TRUNCATED, UNREADABLE, http_error
from penstock.loadtest.messages import Answer, Call

_DETAIL_CHARS = 300
encode = msgspec.json.Encoder().encode


class HttpClient(ABC):
    """A Client; the protocols say what is sent and how an answer reads."""

    def __init__(self, options: ClientOptions) -> None:
        self.options = options
        self.pool = ConnectionPool(options.url, keep_alive=options.keep_alive, verify_tls=options.verify_tls)

    async def open(self) -> None:
        """Nothing to check beyond the address."""

    @abstractmethod
    def request(self, call: Call) -> bytes:
        """The whole request: head and body."""

    @abstractmethod
    def read(self, response: HttpResponse, answer: Answer) -> None:
        """Fills in what a response with status 200 says. Raises one of UNREADABLE for what is not the protocol's."""

    async def send(self, call: Call) -> Answer:
        request = self.request(call)
        began = perf_counter()
        try:
            async with asyncio.timeout(self.options.timeout) as limit:
                response = await self.pool.exchange(request)
        except OSError as error:  # TimeoutError is one, of this client and of the kernel
            kind, detail = (TIMEOUT, "") if limit.expired() else (CONNECT, str(error) or type(error).__name__)
        except ConnectionLostError as error:
            kind, detail = (CONNECT if error.answer is None else TRUNCATED), str(error)
            began = began if error.answer is None else error.answer.sent
        except MalformedError as error:
            kind, detail = MALFORMED, str(error)
        else:
            return self._answer(response)
        return Answer(sent=began, ended=perf_counter(), error=kind, detail=detail[:_DETAIL_CHARS])

    def _answer(self, response: HttpResponse) -> Answer:
        times = response.times
        answer = Answer(sent=response.sent, ended=times[-1], connect=response.connect, reads=len(times))
        answer.rest = partial(self._take_apart, response, answer)
        if not self.options.defer:
            answer.complete()
        return answer

    def _take_apart(self, response: HttpResponse, answer: Answer) -> None:
        if response.status != 200:
            answer.error = http_error(response.status)
            answer.detail = _where_to(response) or shortened(response.body)
        else:
            try:
                _check_coding(response)
                self.read(response, answer)
            except UNREADABLE as error:
                answer.error, answer.detail = MALFORMED, str(error)[:_DETAIL_CHARS]

    def head(
        self, path: str, *, accept: str = "application/json", kind: str = "application/json", **fields: str
    ) -> bytes:
        """What all requests to a path begin with. Made once: `post` adds the rest."""
        return head(self.pool, self.options, "POST", path, content_type=kind, accept=accept, **fields)

    @staticmethod
    def post(head: bytes, body: bytes) -> bytes:
        return b"%b\r\nContent-Length: %d\r\n\r\n%b" % (head, len(body), body)

    async def close(self) -> None:
        self.pool.close()


def _check_coding(response: HttpResponse) -> None:
    """Raises ValueError for an answer in a coding that was not asked for: none was."""
    coding = response.field("Content-Encoding") or "identity"
    if coding.lower() != "identity":
        raise ValueError(f"the answer is in the coding {coding}, which was not asked for")


def _where_to(response: HttpResponse) -> str:
    """What a redirect says, which is not followed: the detour would be measured as the server's."""
    place = response.field("Location")
    return f"to {place}"[:_DETAIL_CHARS] if place else ""


def merged(body: dict[str, Any], extra: dict[str, object]) -> dict[str, Any]:
    """A request with what the user adds to it; null leaves a field out."""
    if not extra:
        return body
    return {name: value for name, value in (body | extra).items() if value is not None}


def shortened(raw: bytes) -> str:
    """What an error says."""
    return raw[:_DETAIL_CHARS].decode("utf-8", "replace")
