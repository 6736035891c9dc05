"""Frames that are not part of a request: settings, pings, windows, priorities, and the client's farewell."""

from __future__ import annotations

from penstock.gateway.transports.http2 import frames
from penstock.gateway.transports.http2.bounds import ConnectionBounds, Http2Limits, PingJudge
from penstock.gateway.transports.http2.frames import (
    ConnectionFault,
    FrameType,
    Http2ErrorCode,
    StreamFault,
    protocol_error,
    wrong_length,
)
from penstock.gateway.transports.http2.heads import ClientLeaving, PingAnswered
from penstock.gateway.transports.http2.sending import ClientSettings, Sender, read_settings
from penstock.gateway.transports.http2.streams import OpenStream, StreamNumbers

_TOO_LARGE = "a stream's window is too large"


class ControlFrames:
    """Each method takes a frame's flags, stream and payload. They raise ConnectionFault and StreamFault."""

    def __init__(
        self,
        limits: Http2Limits,
        bounds: ConnectionBounds,
        settings: ClientSettings,
        sender: Sender,
        judge: PingJudge,
        numbers: StreamNumbers,
        streams: dict[int, OpenStream],
    ) -> None:
        self._max_unsent = limits.max_unsent_bytes
        self._bounds = bounds
        self._settings = settings
        self._sender = sender
        self._judge = judge
        self._numbers = numbers
        self._streams = streams

    def priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Means nothing any more (RFC 9113, 5.3.2)."""
        if not stream_id:
            raise protocol_error("PRIORITY is for no stream")
        if len(payload) != 5:
            raise wrong_length("PRIORITY")
        self._bounds.without_use()

    def settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise protocol_error("SETTINGS is for a stream")
        if flags & frames.ACK:
            if payload:
                raise wrong_length("an acknowledgement of settings")
            self._bounds.without_use()
            return
        self._bounds.settings()
        before = self._settings.initial_window
        read_settings(payload, self._settings)
        self._sender.settings_changed()
        grown = self._settings.initial_window - before
        if grown:
            for stream in self._streams.values():
                if stream.send_window + grown > frames.MAX_WINDOW:
                    raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, _TOO_LARGE)
                self._sender.grow_stream(stream, grown)
        self._answer(frames.SETTINGS_ACK)

    def push_promise(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise protocol_error("a client cannot push")

    def ping(self, flags: int, stream_id: int, payload: bytes) -> PingAnswered | None:
        if stream_id:
            raise protocol_error("PING is for a stream")
        if len(payload) != 8:
            raise wrong_length("PING")
        self._bounds.without_use()
        if flags & frames.ACK:
            return PingAnswered(payload)
        self._judge.received(self._bounds.now, idle=not self._streams)
        self._answer(frames.frame(FrameType.PING, frames.ACK, 0, payload))
        return None

    def _answer(self, frame: bytes) -> None:
        """To a client that asks without reading the answers, they would pile up."""
        self._sender.control(frame)
        if self._sender.size > self._max_unsent and not self._sender.open:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "answers are not read")

    def go_away(self, flags: int, stream_id: int, payload: bytes) -> ClientLeaving:
        if stream_id:
            raise protocol_error("GOAWAY is for a stream")
        if len(payload) < 8:
            raise wrong_length("GOAWAY")
        self._bounds.without_use()
        return ClientLeaving(frames.NUMBER.unpack_from(payload, 4)[0])

    def window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise wrong_length("WINDOW_UPDATE")
        self._bounds.without_use()
        increment = frames.NUMBER.unpack(payload)[0] & frames.MAX_WINDOW
        if not stream_id:
            if not increment:
                raise protocol_error("a window grows by nothing")
            self._sender.grow(increment)
            return
        if stream_id > self._numbers.last:
            raise self._numbers.wrong(stream_id)
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        if not increment:
            raise StreamFault(Http2ErrorCode.PROTOCOL_ERROR, "a window grows by nothing")
        if stream.send_window + increment > frames.MAX_WINDOW:
            raise StreamFault(Http2ErrorCode.FLOW_CONTROL_ERROR, _TOO_LARGE)
        self._sender.grow_stream(stream, increment)
