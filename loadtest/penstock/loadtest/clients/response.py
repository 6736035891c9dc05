"""A response of HTTP/1.1 (httptools takes it apart), and when each of its bytes had come."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

_MAX_HEAD = 1 << 16


class MalformedError(ValueError):
    """This is not HTTP/1.1."""


class HttpResponse:
    """Fed with reads as they come. httptools calls what begins with `on_`."""

    __slots__ = (
        "_body",
        "_fields",
        "_head_bytes",
        "_parser",
        "_parts",
        "_parts_after_read",
        "closes",
        "complete",
        "connect",
        "on_body",
        "sent",
        "status",
        "surplus",
        "times",
        "until_end",
    )

    def __init__(self, sent: float, connect: float) -> None:
        self.sent = sent
        self.connect = connect
        self.times: list[float] = []
        """time.perf_counter of each read. A list of its own: tuples would be work for the garbage collector."""
        self.status = 0
        """0 while the head is incomplete. Interim responses (100 Continue, 103 Early Hints) are left out."""
        self.complete = False
        self.closes = False
        """The server closes the connection afterwards."""
        self.until_end = False
        """Only the end of the connection ends the body."""
        self.surplus = False
        """More came than the response."""
        self._head_bytes = 0
        self._fields: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []
        self._parts_after_read: list[int] = []
        """How many parts of the body there were after each read."""
        self._body: bytes | None = None
        self.on_body: Callable[[bytes], None] = self._parts.append
        self._parser = HttpResponseParser(self)
        # A response that has a length and chunks goes by its chunks (RFC 9112, section 6.3).
        self._parser.set_dangerous_leniencies(lenient_chunked_length=True)

    def feed(self, data: bytes, now: float) -> None:
        """Raises MalformedError."""
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            if not self.complete:
                raise MalformedError(f"not an HTTP/1.1 answer: {data[:40]!r}: {error}") from None
            self.surplus = True
        self.times.append(now)
        self._parts_after_read.append(len(self._parts))
        if not self.status:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD:
                raise MalformedError(f"the head of the answer has more than {_MAX_HEAD} bytes")

    def release(self) -> None:
        """Nothing more is fed. Parser and response hold each other: now they need no garbage collector."""
        del self._parser, self.on_body

    def on_message_begin(self) -> None:
        self.surplus = self.complete

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # else it is a trailer
            self._fields.setdefault(name.lower(), value)

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status == 101:
            raise MalformedError("the server changes the protocol")
        if status < 200:
            self._fields.clear()
        elif not self.status:
            self.status = status
            self.closes = not self._parser.should_keep_alive()
            chunked = b"chunked" in self._fields.get(b"transfer-encoding", b"").lower()
            self.until_end = not chunked and b"content-length" not in self._fields

    def on_message_complete(self) -> None:
        self.complete = self.status > 0

    @property
    def body(self) -> bytes:
        if self._body is None:
            self._body = b"".join(self._parts)
        return self._body

    def field(self, name: str) -> str | None:
        """The value of a header."""
        value = self._fields.get(name.lower().encode())
        return None if value is None else value.rstrip().decode("latin-1")

    def arrivals(self, ends: Iterable[int]) -> list[float]:
        """For ascending offsets into the body: when the bytes before each of them had arrived."""
        sizes = list(accumulate(map(len, self._parts), initial=0))
        reads = zip(self.times, self._parts_after_read, strict=True)
        times: list[float] = []
        time, there = 0.0, -1
        for end in ends:
            while there < end:
                time, parts = next(reads)
                there = sizes[parts]
            times.append(time)
        return times


_EMPTY_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_END_OF_LINE = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


def check_stream(answer: HttpResponse) -> None:
    """Raises ValueError for an answer that is something else."""
    kind = answer.field("Content-Type") or ""
    if not kind.lower().startswith("text/event-stream"):
        raise ValueError(f"a stream was asked for, not {kind or 'this'}: {answer.body[:200]!r}")


def events(answer: HttpResponse) -> Iterator[tuple[float, bytes]]:
    """(arrival, data) of each event that has data; comments and other fields are left out, and so is what no empty
    line ends: it broke off."""
    body = answer.body
    if b"\r" in body:
        ends = [match.end() for match in _EMPTY_LINE.finditer(body)]
        blocks = [body[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    else:
        blocks = body.split(b"\n\n")
        blocks.pop()
        ends = list(accumulate([len(block) + 2 for block in blocks]))
    for time, block in zip(answer.arrivals(ends), blocks, strict=True):
        if block.startswith(b"data: ") and b"\n" not in block and b"\r" not in block:  # what most servers send
            yield time, block[6:]
        elif data := _data(block):
            yield time, data


def breaks_off(answer: HttpResponse) -> bool:
    """Whether the last event lacks the empty line that ends it."""
    return not answer.body.endswith((b"\n\n", b"\n\r\n", b"\r\r")) and bool(answer.body)


def _data(block: bytes) -> bytes:
    lines = _END_OF_LINE.split(block.removeprefix(_BOM))
    return b"\n".join([line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")])
