"""What takes too long on a connection."""

from __future__ import annotations

from penstock.gateway.grpc_transport.settings import ConnectionSettings
from penstock.gateway.http2.connection import Http2Connection


class ConnectionWatch:
    """Times are those of the loop."""

    def __init__(self, settings: ConnectionSettings, now: float) -> None:
        self._settings = settings
        self._made = now
        self.last_received = now
        self._pinged: float | None = None
        """When, and nothing has come since."""
        self._pings = 0
        """Since data or headers were last sent."""
        self._taken = 0
        """Bytes that the client had taken when that was last looked at."""
        self._taken_at = now
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
        if not unwritten or taken != self._taken:
            self._taken, self._taken_at = taken, now
        if not http2.begun:
            return now - self._made > settings.start_seconds
        if http2.in_frame and now - self.last_received > settings.frame_seconds:
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
