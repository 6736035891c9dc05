"""What takes too long on a connection."""

from __future__ import annotations

from penstock.gateway.http2.connection import Http2Connection
from penstock.gateway.http2_sockets.settings import SocketSettings


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
            return now - self._made > settings.start_seconds
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
