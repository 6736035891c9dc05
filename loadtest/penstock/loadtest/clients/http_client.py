"""What clients over HTTP share: sending, failing, and telling an error from an answer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from time import perf_counter

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.http1 import ConnectionLostError, ConnectionPool, ParsedAnswer, RawAnswer
from penstock.loadtest.errors import CONNECT, MALFORMED, TIMEOUT, TRUNCATED, http_error
from penstock.loadtest.messages import Answer, Call

_DETAIL_CHARS = 300


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
    def read(self, response: ParsedAnswer, answer: Answer) -> None:
        """Fills in what a response with status 200 says. Raises ValueError (msgspec's errors are) for what is not the
        protocol's."""

    async def send(self, call: Call) -> Answer:
        request = self.request(call)
        began = perf_counter()
        try:
            async with asyncio.timeout(self.options.timeout):
                raw = await self.pool.exchange(request)
        except TimeoutError:
            return Answer(sent=began, ended=perf_counter(), error=TIMEOUT)
        except OSError as error:
            return Answer(sent=began, ended=perf_counter(), error=CONNECT, detail=str(error)[:_DETAIL_CHARS])
        except ConnectionLostError as error:
            if error.answer is None:
                return Answer(sent=began, ended=perf_counter(), error=CONNECT, detail=str(error))
            return Answer(sent=error.answer.sent, ended=perf_counter(), error=TRUNCATED, detail=str(error))
        return self._answer(raw)

    def _answer(self, raw: RawAnswer) -> Answer:
        answer = Answer(sent=raw.sent, ended=raw.reads[-1][0], connect=raw.connect, reads=len(raw.reads))
        response = raw.parse()
        if response is None:
            answer.error = TRUNCATED
        elif response.status != 200:
            answer.error = http_error(response.status)
            answer.detail = response.body[:_DETAIL_CHARS].decode("utf-8", "replace")
        else:
            try:
                self.read(response, answer)
            except ValueError as error:
                answer.error, answer.detail = MALFORMED, str(error)[:_DETAIL_CHARS]
        return answer

    def post(
        self, path: str, body: bytes, *, accept: str = "application/json", kind: str = "application/json"
    ) -> bytes:
        """A POST below the URL's path."""
        options = self.options
        lines = [
            f"POST {self.pool.path}{path} HTTP/1.1",
            f"Host: {self.pool.authority}",
            f"Content-Type: {kind}",
            f"Accept: {accept}",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in options.headers.items()),
        ]
        if options.api_key is not None:
            lines.append(f"Authorization: Bearer {options.api_key}")
        if not options.keep_alive:
            lines.append("Connection: close")
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def close(self) -> None:
        self.pool.close()
