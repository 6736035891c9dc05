"""What a connection has to say about the bytes that it got."""

from __future__ import annotations

import msgspec

from penstock.gateway.http2.errors import ErrorCode
from penstock.gateway.http2.fields import RequestHead


class RequestStarted(msgspec.Struct, frozen=True, gc=False):
    """The headers of a request are there."""

    stream_id: int
    head: RequestHead
    ended: bool
    """Without a body."""


class DataReceived(msgspec.Struct, frozen=True, gc=False):
    """A piece of a request's body. `credit` has to be called for it when it is used up."""

    stream_id: int
    data: bytes
    ended: bool
    """The body ends with it."""


class StreamReset(msgspec.Struct, frozen=True, gc=False):
    """A stream has ended before its time: by the client, or for a fault of the client's."""

    stream_id: int
    code: int


class PingAnswered(msgspec.Struct, frozen=True, gc=False):
    payload: bytes


class ClientLeaving(msgspec.Struct, frozen=True, gc=False):
    """The client opens no more streams."""

    code: int


class ConnectionFailed(msgspec.Struct, frozen=True, gc=False):
    """The client broke a rule: what is queued tells it so, and nothing more is received."""

    code: ErrorCode
    text: str


StreamEvent = RequestStarted | DataReceived | StreamReset
Event = StreamEvent | PingAnswered | ClientLeaving | ConnectionFailed
