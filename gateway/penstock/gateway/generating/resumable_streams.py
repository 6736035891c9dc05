"""Streams that go on without their client for some time: with `Last-Event-ID` it gets the rest.

The answer is made in a task of its own, which writes its events into a log. Who asks reads from the log.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from starlette.types import Message

from penstock.engines.errors import CancelledError, InvalidRequestError, NotFoundError
from penstock.gateway.generating.event_log import EventLog
from penstock.gateway.generating.streams import send_frames
from penstock.gateway.models.language.dataplane import Generation
from penstock.gateway.requests.call import Detached, ServedCall
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.settings import AppSettings

HEADER = b"last-event-id"
_PARAM = "Last-Event-ID"
_LOG_BYTES = 1 << 20
"""Of the events of one stream. A client that is further behind gets an error."""
_MOST_STREAMS = 256
"""That are being made; more are streams like any other, without ids."""
_MOST_ENDED = 4096
"""Answers that are whole and still kept, however short they are."""
_ENDED_BYTES = 64 << 20
"""Of the events of all streams that have ended."""
_LONGEST_NUMBER = 9
_ROUTE = "resumable stream"
"""Of the work, in records and metrics; who reads is a request of the public route."""

Generate = Callable[[RequestContext], Awaitable[Generation]]
Respond = Callable[[Exchange, Generation], Awaitable[None]]


class ResumableStreams:
    """All of a server. Lives on the event loop."""

    def __init__(self, settings: AppSettings, seconds: float) -> None:
        """`seconds`: for which a stream goes on without a client, and is kept after its end."""
        self.settings = settings
        self.seconds = seconds
        self._streams: dict[str, ResumableStream] = {}
        self._ended: dict[str, ResumableStream] = {}
        """Those of them that have ended, the oldest first."""
        self._ended_bytes = 0

    @property
    def has_room(self) -> bool:
        return len(self._streams) - len(self._ended) < _MOST_STREAMS

    def may_be_read_by(self, exchange: Exchange) -> bool:
        """Whether the request names a stream of its key that is still being made, and has a place among the key's
        requests. Who reads needs no second one."""
        stream = self._named(exchange)
        return (
            stream is not None
            and stream.key == exchange.context.principal.key
            and stream.path == exchange.scope["path"]
            and not stream.log.ended
        )

    def is_read_by(self, exchange: Exchange, body: bytes) -> bool:
        """The same, of a request whose body is there."""
        stream = self._named(exchange)
        return stream is not None and self.may_be_read_by(exchange) and stream.digest == _digest(exchange, body)

    def _named(self, exchange: Exchange) -> ResumableStream | None:
        name, _, _ = exchange.headers.get(HEADER, b"").decode("latin-1").rpartition("-")
        return self._streams.get(name)

    async def resume(self, exchange: Exchange, body: bytes) -> bool:
        """Sends the rest of a stream to who names the last event that came. False: no event is named. Raises
        NotFoundError for a stream that is not kept, or another caller's, InvalidRequestError for another request's."""
        header = exchange.only_header(HEADER)
        if not header:
            return False
        name, _, number = header.decode("latin-1").rpartition("-")
        stream = self._streams.get(name)
        if stream is None or stream.tenant != exchange.context.tenant:
            message = "There is no such stream (any more): send the request without Last-Event-ID."
            raise NotFoundError(message, param=_PARAM)
        if not number.isdecimal() or len(number) > _LONGEST_NUMBER:
            raise InvalidRequestError("Last-Event-ID: this is not an event of the stream.", param=_PARAM)
        if stream.digest != _digest(exchange, body):
            message = "Last-Event-ID: it is the id of another request's stream; the body must be the same."
            raise InvalidRequestError(message, param=_PARAM)
        stream.log.check(int(number))
        await stream.send(exchange, int(number))
        return True

    async def begin(
        self,
        exchange: Exchange,
        body: bytes,
        generate: Generate,
        respond: Respond,
    ) -> None:
        """Makes the answer in a task of its own, and sends it while the client is there. Raises what `generate` does.
        `generate` is given the context that the work is counted in from now on."""
        own = exchange.context.next_request()
        own.record.route = _ROUTE
        exchange.context.hand_over_to(own)
        stream = ResumableStream(self, own, exchange.scope["path"], _digest(exchange, body))
        self._streams[stream.name] = stream
        try:
            await stream.begin(exchange, generate, respond)
        except BaseException:
            self.forget(stream)
            raise
        await stream.send(exchange, -1)

    def ended(self, stream: ResumableStream) -> None:
        """It stays for some time, or until others need its room."""
        if stream.name not in self._streams:
            return
        self._ended[stream.name] = stream
        self._ended_bytes += stream.log.bytes
        stream.forgotten = asyncio.get_running_loop().call_later(self.seconds, self.forget, stream)
        while self._ended_bytes > _ENDED_BYTES or len(self._ended) > _MOST_ENDED:
            self.forget(next(iter(self._ended.values())))

    def forget(self, stream: ResumableStream) -> None:
        """Who asks for it from now on is told that there is no such stream."""
        if stream.forgotten is not None:
            stream.forgotten.cancel()
        self._streams.pop(stream.name, None)
        if self._ended.pop(stream.name, None) is not None:
            self._ended_bytes -= stream.log.bytes


class ResumableStream:
    """One answer."""

    def __init__(self, streams: ResumableStreams, context: RequestContext, path: str, digest: bytes) -> None:
        self.name = secrets.token_hex(12)
        self.tenant, self.key = context.tenant, context.principal.key
        self.path = path
        self.digest = digest
        self.log = EventLog(_LOG_BYTES, _PARAM)
        self._streams = streams
        self._context = context
        self._num_readers = 0
        self._leaving: asyncio.TimerHandle | None = None
        self.forgotten: asyncio.TimerHandle | None = None
        """When an answer that is whole is kept no longer."""
        self._work: Detached | None = None

    async def begin(self, exchange: Exchange, generate: Generate, respond: Respond) -> None:
        """Returns when the answer has begun; a client that leaves before gives it up. Raises what `generate` does."""
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        begun.add_done_callback(lambda done: done.cancelled() or done.exception())  # its client may have left
        work = partial(self._run, exchange, generate, respond, begun)
        self._work = Detached(self._context, self._streams.settings.journal, work, self._ended)
        self._work.start()
        try:
            await asyncio.shield(begun)
        except asyncio.CancelledError:
            self._work.cancel()
            raise

    async def _run(self, exchange: Exchange, generate: Generate, respond: Respond, begun: asyncio.Future[None]) -> None:
        recorder = _Recorder(exchange, self._context, self._write)
        try:
            with ServedCall(self._streams.settings.drain, self._context):
                generation = await generate(self._context)
                begun.set_result(None)
                try:
                    await respond(recorder, generation)
                finally:
                    generation.close()
        except Exception as error:
            if begun.done():
                await recorder.fail(error)
            else:
                self._context.record.failed(error)
                begun.set_exception(error)

    def _ended(self, error: BaseException | None) -> None:
        self.log.end()
        if isinstance(error, asyncio.CancelledError):  # the answer is not whole
            self._streams.forget(self)
        else:
            self._streams.ended(self)

    def _write(self, data: bytes) -> None:
        """Events of the answer, without comments, get their ids."""
        events = [event for event in data.split(b"\n\n") if event and not event.startswith(b":")]
        name, number = self.name.encode(), self.log.number
        numbered = [b"id: %b-%d\n%b\n\n" % (name, number + place, event) for place, event in enumerate(events)]
        self.log.add(b"".join(numbered), number + len(events))

    async def send(self, exchange: Exchange, after: int) -> None:
        """The events behind this number, until the last one or until the client leaves."""
        self._num_readers += 1
        if self._leaving is not None:
            self._leaving.cancel()
        try:
            await send_frames(exchange, self._frames(after))
        finally:
            self._num_readers -= 1
            if not self._num_readers and self._work is not None:
                self._leaving = asyncio.get_running_loop().call_later(self._streams.seconds, self._work.cancel)

    async def _frames(self, after: int) -> AsyncIterator[bytes]:
        async for frames in self.log.follow(after, self._streams.settings.heartbeat_s or None):
            yield frames
        if self._work is not None and self._work.cancelled:  # just as this client came back
            raise CancelledError("The stream was ended: its client did not come back in time.")


class _Recorder(Exchange):
    """Takes what an answer would have sent."""

    def __init__(self, exchange: Exchange, context: RequestContext, write: Callable[[bytes], None]) -> None:
        super().__init__(exchange.scope, exchange.receive, self._record, exchange.drain)
        self.context = context
        self.error_form = exchange.error_form
        self.body_writer = None
        self._write = write

    async def _record(self, message: Message) -> None:
        if message["type"] == "http.response.body" and message.get("body"):
            self._write(message["body"])


def _digest(exchange: Exchange, body: bytes) -> bytes:
    """Of the request: who comes again has to ask for the same."""
    return hashlib.sha256(exchange.scope["path"].encode() + b"\n" + body).digest()
