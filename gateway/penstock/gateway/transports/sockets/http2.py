"""Bytes between a socket and the state machine, and how a connection ends."""

from __future__ import annotations

import asyncio
import random
import time
from abc import abstractmethod

from penstock.gateway.requests.intake import ConnectionShare
from penstock.gateway.transports.http2.connection import Http2Connection
from penstock.gateway.transports.http2.frames import Http2ErrorCode
from penstock.gateway.transports.http2.heads import (
    ClientLeaving,
    ConnectionFailed,
    DataReceived,
    RequestStarted,
    StreamEvent,
    StreamReset,
)
from penstock.gateway.transports.sockets.connection import SocketConnection, SocketPort, SocketSettings, untaken_bytes


class ConnectionWatch:
    """Times are those of the loop."""

    def __init__(self, settings: SocketSettings, now: float) -> None:
        self._settings = settings
        self._opened_at = now
        self.last_received = now
        self._pinged: float | None = None
        """When, and nothing has come since."""
        self._pings = 0
        """Since data or headers were last sent."""
        self._frame, self._frame_since = 0, now
        """How many frames had come when an unfinished one was first seen, and when that was."""
        self._unsent: dict[int, tuple[int, float]] = {}
        """The same for streams whose data waits."""

    def received(self, now: float) -> None:
        self.last_received = now
        self._pinged = None

    def sent(self) -> None:
        """Data or headers."""
        self._pings = 0

    def late(self, now: float, http2: Http2Connection) -> bool:
        """The client has had its time to send."""
        settings = self._settings
        if not http2.begun:
            return now - self._opened_at > settings.start_seconds
        if not http2.in_frame or http2.finished_frames != self._frame:
            self._frame, self._frame_since = http2.finished_frames, now
        elif (
            now - self.last_received > settings.frame_seconds or now - self._frame_since > settings.whole_frame_seconds
        ):
            return True
        return self._pinged is not None and now - self._pinged > settings.keepalive_timeout

    def stalled_streams(self, now: float, http2: Http2Connection) -> list[int]:
        """Streams of whose data the client has long taken nothing."""
        before, self._unsent = self._unsent, {}
        stalled = []
        for stream_id, stream in http2.streams.items():
            if stream.unsent:
                size, since = before.get(stream_id, (0, now))
                self._unsent[stream_id] = (stream.unsent, since if stream.unsent == size else now)
                if now - self._unsent[stream_id][1] > self._settings.stream_seconds:
                    stalled.append(stream_id)
        return stalled

    def wants_ping(self, now: float, *, busy: bool) -> bool:
        """Notes that one is sent."""
        settings = self._settings
        if self._pinged is not None or now - self.last_received < settings.keepalive_time:
            return False
        if not (busy or settings.keepalive_without_calls):
            return False
        if settings.max_pings_without_data and self._pings >= settings.max_pings_without_data:
            return False
        self._pings += 1
        self._pinged = now
        return True


_WRITE_BUFFER = 128 << 10
"""Bytes that may wait in the transport before data waits in its streams."""
_AGE_JITTER = 0.1
_TAKEN_SECONDS = 0.1
"""Between two looks whether the client has taken what a connection that ends has written."""
_LAST_CHANCE_SECONDS = 20.0
"""For a client that does not say whether it knows that no more streams are taken."""
_SLICE_BYTES = 16 << 10
_SLICE_SECONDS = 0.005
"""What a client has sent at once is looked at in slices; after this time others have their turn. The rest of
one frame is never cut."""


class Http2SocketConnection(SocketConnection):
    """What its streams are for, a subclass knows."""

    def __init__(self, port: SocketPort) -> None:
        super().__init__(port)
        self.http2 = Http2Connection(port.limits, self._loop.time())
        self._settings = port.settings
        self.share = ConnectionShare(port.bodies)
        self._unlooked = b""
        """Bytes that have come and have not been looked at."""
        self._flushing = False
        """Output is going to be written in this turn of the loop."""
        self._closing = False
        """No requests come any more; it is closed when those that run have ended."""
        self.watch = ConnectionWatch(port.settings, self._loop.time())

    # What a subclass has

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Requests run."""

    @abstractmethod
    def on_stream_event(self, event: StreamEvent) -> None: ...

    @abstractmethod
    def relieved(self, stream_id: int) -> None:
        """Less of the stream waits for the client than before."""

    @abstractmethod
    def end_requests(self) -> None:
        """The client has gone, or broken a rule."""

    @abstractmethod
    def look_at_requests(self, now: float) -> None:
        """Once a second."""

    # The socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self.join(transport, _WRITE_BUFFER):
            self._transport.abort()
            return
        age = self._settings.max_age
        if age is not None:
            self._later(age * random.uniform(1 - _AGE_JITTER, 1 + _AGE_JITTER), self._too_old)
        if self._connections.stopping:
            self.refuse_requests()
        self._flush()

    @property
    def replaceable(self) -> bool:
        return not (self.busy or self.http2.streams or self._ending or self._transport.is_closing())

    @property
    def idle_since(self) -> float:
        return self.watch.last_received

    def connection_lost(self, exc: Exception | None) -> None:
        self.end_requests()
        self._unlooked = b""
        self.http2.abandon()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self.http2.pause()

    def resume_writing(self) -> None:
        self.http2.resume()
        self._read_on()
        self._flush_soon()

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        self.watch.received(self._loop.time())
        if self._unlooked:
            self._unlooked += data
        elif len(data) <= _SLICE_BYTES:
            self._receive(data)
        else:
            self._unlooked = data
            self._look()

    def _look(self) -> None:
        """At what has come, for a while."""
        data, done, begun = self._unlooked, 0, time.monotonic()
        while done < len(data):
            size = max(_SLICE_BYTES, self.http2.left_of_frame)
            self._receive(data[done : done + size])
            done += size
            if time.monotonic() - begun > _SLICE_SECONDS:
                break
        self._unlooked = data[done:]
        if self._unlooked:
            self._loop.call_soon(self._look)
        self._read_on()

    def _receive(self, data: bytes) -> None:
        for event in self.http2.receive(data, self._loop.time()):
            if isinstance(event, (DataReceived, RequestStarted, StreamReset)):
                self.on_stream_event(event)
            elif isinstance(event, ConnectionFailed):
                self._fail()
            else:
                self._closing = self._closing or isinstance(event, ClientLeaving)
                self._close_if_done()
        if self.http2.has_output:
            self._flush_soon()
        if self.http2.unread:
            self._read_on()
        if self._closing:
            self._connections.note()

    def _read_on(self) -> None:
        """Or not, while there is enough to look at, or to be read by the client."""
        reading = not (self._unlooked or self.http2.unread)
        self._read(on=reading)

    def abort(self) -> None:
        if self._ending and not self._transport.get_write_buffer_size():
            self._transport.close()  # the kernel goes on with what the client has not taken yet
        else:
            self._transport.abort()

    # Output

    def sent(self) -> None:
        """Headers or data have been queued."""
        self.watch.sent()
        self._flush_soon()

    def credit(self, stream_id: int, size: int) -> None:
        self.http2.credit(stream_id, size)
        self._flush_soon()

    def _flush_soon(self) -> None:
        """Everything that is queued in this turn of the loop leaves in one write."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._ending or self._transport.is_closing():
            return
        while not self.http2.paused and self.http2.has_output:
            data, relieved = self.http2.take_output()
            self._written += len(data)
            self._transport.write(data)
            for stream_id in relieved:
                self.relieved(stream_id)
        self._note_unread(self.http2.held_bytes)
        self._close_if_done()

    # The end

    def _fail(self) -> None:
        """The client broke a rule: it is told so, and that is all."""
        self.end_requests()
        self.http2.resume()
        self._flush()
        self._close()

    def _too_old(self) -> None:
        self.leave("max_age")
        if self._settings.max_age_grace is not None:
            self._later(self._settings.max_age_grace, self.abort)

    def leave(self, text: str) -> None:
        """The client is told to open no more streams here; those that are open may end."""
        if self._closing:
            return
        self._closing = True
        self.http2.announce_end(text)
        self._later(_LAST_CHANCE_SECONDS, self.refuse_requests)
        self._flush_soon()

    def refuse_requests(self) -> None:
        """New streams are not taken from now on."""
        self._closing = True
        self.http2.close_to_new_streams()
        self._flush_soon()

    shutdown = refuse_requests

    @property
    def left(self) -> bool:
        """The client knows that it can open no more streams here."""
        return self._ending or self.http2.closed_to_new_streams or self.http2.client_left

    def request_over(self) -> None:
        if self._closing:
            self._close_if_done()

    def _close_if_done(self) -> None:
        if self._closing and self.left and not (self.busy or self.http2.streams or self.http2.has_output):
            self._close()

    def _close(self) -> None:
        """Closing waits until everything is written, and without TLS, which has an end of its own, until the client has
        it, too: to bytes for a socket that is closed the kernel answers with a reset, and drops what is still on its
        way. Clients that read a long answer send such bytes all the time."""
        if self._ending or self._transport.is_closing():
            return
        self._ending = True
        self._later(self._settings.send_seconds, self.abort)
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._close_when_taken()
        else:
            self._transport.close()

    def _close_when_taken(self) -> None:
        if self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() or untaken_bytes(self._transport):
            self._later(_TAKEN_SECONDS, self._close_when_taken)
        else:
            self._transport.close()

    def tick(self, now: float) -> None:
        if self._ending:
            return
        watch, http2 = self.watch, self.http2
        untaken = self._untaken()
        unread_seconds = self.reader.idle_seconds(now, self._written - untaken, untaken, http2.held_bytes)
        if watch.late(now, http2) or unread_seconds > self._settings.send_seconds:
            self.abort()
            return
        self._note_unread(http2.held_bytes)
        self.look_at_requests(now)
        for stream_id in watch.stalled_streams(now, http2):
            http2.reset(stream_id, Http2ErrorCode.CANCEL)
            self.on_stream_event(StreamReset(stream_id, Http2ErrorCode.CANCEL))
        if watch.wants_ping(now, busy=self.busy):
            http2.ping(b"are you?")
        if http2.has_output:
            self._flush_soon()
