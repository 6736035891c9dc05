"""What takes too long on a connection."""

from __future__ import annotations

from penstock.gateway.http2.connection import Http2Connection
from penstock.gateway.http2_sockets.settings import SocketSettings

_SLOWEST = 1024
"""Bytes per second. Below this, clients are all the same."""


class ConnectionWatch:
    """Times are those of the loop."""

    def __init__(self, settings: SocketSettings, now: float) -> None:
        self._settings = settings
        self._made = now
        self.last_received = now
        self._pinged: float | None = None
        """When, and nothing has come since."""
        self._pings = 0
        """Since data or headers were last sent."""
        self._frame, self._frame_since = 0, now
        """How many frames had come when an unfinished one was first seen, and when that was."""
        self._taken = 0
        """Bytes that the client had taken when that was last looked at."""
        self._taken_at = now
        self._waiting = 0
        """Bytes that waited for the client then."""
        self.seconds_to_read = 0.0
        """That the client needs for those of them that still wait, as fast as it has taken some since."""
        self._unsent: dict[int, tuple[int, float]] = {}
        """The same for streams whose data waits."""

    def received(self, now: float) -> None:
        self.last_received = now
        self._pinged = None

    def sent(self) -> None:
        """Data or headers."""
        self._pings = 0

    def late(self, now: float, http2: Http2Connection, taken: int, unwritten: int) -> bool:
        """The client has had its time. It has taken so many bytes so far, and so many wait for it in the socket."""
        settings = self._settings
        moved = taken - self._taken
        self.seconds_to_read = max(0, self._waiting - moved) / (moved + _SLOWEST)
        self._waiting = http2.held_bytes + unwritten
        if not unwritten or taken != self._taken:
            self._taken, self._taken_at = taken, now
        if not http2.begun:
            return now - self._made > settings.start_seconds
        if not http2.in_frame or http2.finished_frames != self._frame:
            self._frame, self._frame_since = http2.finished_frames, now
        elif (
            now - self.last_received > settings.frame_seconds or now - self._frame_since > settings.whole_frame_seconds
        ):
            return True
        if self._pinged is not None and now - self._pinged > settings.keepalive_timeout:
            return True
        return now - self._taken_at > settings.send_seconds

    def stalled_streams(self, now: float, http2: Http2Connection) -> list[int]:
        """Streams of whose data the client has long taken nothing."""
        before, self._unsent = self._unsent, {}
        found = []
        for stream_id, stream in http2.streams.items():
            if stream.unsent:
                size, since = before.get(stream_id, (0, now))
                self._unsent[stream_id] = (stream.unsent, since if stream.unsent == size else now)
                if now - self._unsent[stream_id][1] > self._settings.stream_seconds:
                    found.append(stream_id)
        return found

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
