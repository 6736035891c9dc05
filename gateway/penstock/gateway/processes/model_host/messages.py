"""The messages between fronts and the model host, the errors in them, and the windows of streams. Times are of
time.monotonic(), which all processes of a machine share.

A tensor is a place: `[name, datatype, shape, offset, size]` in the frame's tail or, with a segment behind it, in shared
memory (`classic/python/worker/wire.py`).
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from msgspec import Struct

from penstock.classic.messages import Parameter
from penstock.engines.errors import PenstockError, from_code
from penstock.gateway.apis.kserve.tracing import SharedTracing
from penstock.gateway.errors import INTERNAL_MESSAGE

logger = logging.getLogger(__name__)

Place = list[Any]
ErrorFields = tuple[str, str, str | None, float | None]
"""Code, message, the field to blame, and seconds after which another try makes sense."""

SEQUENCE_START = 1
SEQUENCE_END = 2
TRACED = 4
STREAMED = 8


class TraceFields(Struct, array_like=True):
    """What the host has noted in the trace of a request, and of those that its model made for it."""

    marks: list[tuple[str, int]]
    children: list[tuple[str, int, TraceFields]]
    """Model, version and what was noted."""


# Either way


class Returned(Struct, array_like=True, tag=True):
    """Blocks of the receiver's arena that the sender has done with."""

    blocks: list[tuple[int, int]]


class Grown(Struct, array_like=True, tag=True):
    """Sizes of new segments of the sender's arena."""

    segments: list[int]


# From a front to the host


class Infer(Struct, array_like=True, tag=True):
    """A request. `number` is the front's own, and never used twice."""

    number: int
    name: str
    version_name: str
    """The version as the caller has named it; "" for the newest."""
    version: int
    """Which one the front takes that to be."""
    flags: int
    inputs: list[Place]
    id: str
    outputs: tuple[str, ...]
    parameters: dict[str, Parameter]
    priority: int
    timeout_us: int
    deadline: float | None
    correlation_id: int | str
    tenant: str
    caller: tuple[str, str] | None
    """The request's id at the front, and its span as in W3C Trace Context."""


class Cancel(Struct, array_like=True, tag=True):
    """Nobody waits for this request, or the rest of its responses, any more."""

    number: int


class Taken(Struct, array_like=True, tag=True):
    """So many responses of a stream, with so many bytes, have been read."""

    number: int
    responses: int
    size: int


class Known(Struct, array_like=True, tag=True):
    """The front answers by this generation of what the host has published. Sent again when `regions` changes."""

    generation: int
    regions: list[str] = []
    """Which of those that are `leaving` its requests use."""


class Traced(Struct, array_like=True, tag=True):
    """A request's trace and those of the requests made for it, as `Tracing.keep` takes them."""

    model: str
    traces: list[list[bytes]]


# From the host to a front


class Response(Struct, array_like=True, tag=True):
    number: int
    final: bool
    outputs: list[Place] | None
    parameters: dict[str, Parameter] | None
    error: ErrorFields | None
    version: int
    """Which one has answered."""
    calls: list[tuple[str, float, float]]
    """Models that were called for the request, with beginning and end; with the final response."""
    trace: TraceFields | None
    """With the final response of a traced request."""
    refused: bool = False
    """The error is why the request was never begun."""


class Described(Struct, array_like=True, tag=True):
    """A model version, before the first Published that names it. `key` is never used twice."""

    key: int
    name: str
    version: int
    config: bytes
    """A serialized ModelConfig."""
    takes_infer: bool
    folder: str
    sources: dict[str, tuple[str, int, str]]
    """Of an ensemble's outputs: model, version and output that they come from."""


class RegionFields(Struct, array_like=True, frozen=True):
    """A region of shared memory that a client has registered. `device` and `inode` say which object it is, `fd` is the
    host's descriptor."""

    name: str
    key: str
    offset: int
    byte_size: int
    tenant: str
    device: int
    inode: int
    fd: int


class Published(Struct, array_like=True, tag=True):
    """All that fronts answer by, but for descriptions of models."""

    generation: int
    models: list[tuple[int, bool, bool]]
    """Keys of the loaded models, whether each is ready, and whether it says so itself."""
    regions: list[RegionFields]
    tracing: SharedTracing | None
    """`SharedTracing`."""
    leaving: list[str] = []
    """Of the regions, those that are unregistered, until no front uses them."""


UpMessage = Returned | Grown | Infer | Cancel | Taken | Known | Traced
DownMessage = Returned | Grown | Response | Described | Published

encode = msgspec.msgpack.Encoder().encode
decode_up = msgspec.msgpack.Decoder(UpMessage).decode
decode_down = msgspec.msgpack.Decoder(DownMessage).decode


def to_fields(error: Exception) -> ErrorFields:
    """Of an error outside the tree nothing but that it happened: it is logged here."""
    if not isinstance(error, PenstockError):
        logger.error("Unexpected error", exc_info=error)
        return PenstockError.code, INTERNAL_MESSAGE, None, None
    return error.code, error.message, error.param, error.retry_after


def to_error(fields: ErrorFields) -> PenstockError:
    code, message, param, retry_after = fields
    error = from_code(code, message)
    error.param, error.retry_after = param, retry_after
    return error


# How many responses of a stream may be on their way, or unread in the front: what bounds its memory. Plain data.
#
# The host counts what it sends, the front what its reader has taken, both in the same way. The host stops at a window
# of responses or bytes; the front reports by halves of it. So a host that has stopped always hears of it when the
# reader has taken everything.

MAX_RESPONSES = 32
MAX_BYTES = 4 << 20
"""Of tensors. A response may be larger: then it is the only one on its way."""


class SendWindow:
    """The host's side of one stream."""

    __slots__ = ("_bytes", "_max_bytes", "_responses")

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._responses = 0
        self._bytes = 0
        self._max_bytes = max_bytes

    @property
    def open(self) -> bool:
        """Whether one more response may leave."""
        return self._responses < MAX_RESPONSES and self._bytes < self._max_bytes

    def sent(self, size: int) -> None:
        """A response with `size` bytes of tensors."""
        self._responses += 1
        self._bytes += size

    def taken(self, responses: int, size: int) -> None:
        """The front's report."""
        self._responses = max(0, self._responses - responses)
        self._bytes = max(0, self._bytes - size)


class ReadWindow:
    """The front's side of the same stream."""

    __slots__ = ("_bytes", "_max_bytes", "_responses")

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._responses = 0
        self._bytes = 0
        self._max_bytes = max_bytes

    def take(self, size: int) -> tuple[int, int] | None:
        """The reader has taken a response of this size. What is to be reported now: responses and bytes."""
        self._responses += 1
        self._bytes += size
        if self._responses < MAX_RESPONSES // 2 and self._bytes < self._max_bytes // 2:
            return None
        report = self._responses, self._bytes
        self._responses = self._bytes = 0
        return report
