"""Where a response of HTTP/1.1 begins and ends (RFC 9112), and when each of its bytes had come."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import accumulate

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([^\r\n]*)", re.IGNORECASE)
_NUMBER = re.compile(rb"\d{1,15}[ \t]*\Z")
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[^\r\n]*\bchunked[ \t]*\r\n", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection:[^\r\n]*\bclose\b", re.IGNORECASE)
_STATUS = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: |\r\n)")
_BEGINNING = b"HTTP/1."
_MAX_HEAD = 1 << 16
_MAX_SIZE_LINE = 1 << 12


class MalformedError(ValueError):
    """This is not HTTP/1.1."""


class Head:
    """Status line and headers. `start` is where the body begins. Raises MalformedError for a length that is none."""

    __slots__ = ("chunked", "closes", "length", "raw", "start", "status")

    def __init__(self, raw: bytes, start: int, status: int, *, closes: bool) -> None:
        self.raw = raw
        self.start = start
        self.status = status
        self.chunked = _CHUNKED.search(raw) is not None
        length = None if self.chunked else _LENGTH.search(raw)
        if length and not _NUMBER.match(length[1]):
            raise MalformedError(f"the length of the answer is {length[1][:40]!r}")
        self.length = int(length[1]) if length else 0 if status in (204, 304) else None
        """Of the body; None: as the chunks or the end of the connection say."""
        self.closes = closes or _CLOSE.search(raw) is not None

    def field(self, name: str) -> str | None:
        """The value of a header."""
        found = re.search(rb"\r\n" + re.escape(name.encode()) + rb":[ \t]*([^\r\n]*)", self.raw, re.IGNORECASE)
        return found[1].rstrip().decode("latin-1") if found else None


def read_head(raw: bytes) -> Head | None:
    """The head that a response begins with, interim ones (100 Continue, 103 Early Hints) left out; None while it is
    incomplete. Raises MalformedError."""
    start = 0
    while True:
        if not raw.startswith(_BEGINNING, start) and not _BEGINNING.startswith(raw[start:]):
            raise MalformedError(f"this is no answer of HTTP/1.1: {raw[start : start + 40]!r}")
        end = raw.find(b"\r\n\r\n", start)
        if end < 0:
            if len(raw) - start > _MAX_HEAD:
                raise MalformedError(f"the head of the answer has more than {_MAX_HEAD} bytes")
            return None
        head = raw[start : end + 2]
        line = _STATUS.match(head)
        if line is None or line[2] == b"101":
            raise MalformedError(f"the answer's status line is {head[:40]!r}")
        if not line[2].startswith(b"1"):
            return Head(head, end + 4, int(line[2]), closes=line[1] == b"0")
        start = end + 4


class Chunks:
    """Where the data of a chunked body lie, found in whatever pieces it is fed with."""

    def __init__(self, start: int) -> None:
        """`start`: offset of the body in the response."""
        self.spans: list[tuple[int, int]] = []
        """(offset in the response, size) of each chunk's data."""
        self.extra = False
        """More came than the response."""
        self._base = start
        """Offset of the first byte that is not done with."""
        self._next = start
        """Offset of the next chunk's size."""
        self._rest = b""

    def feed(self, data: bytes) -> bool:
        """True once the last chunk is there, with its trailers. Raises MalformedError."""
        rest, base = self._rest + data, self._base
        at = self._next - base
        while (line := rest.find(b"\r\n", at)) >= 0:
            size = _size(rest[at:line])
            if not size:
                return self._end(rest, line, at)
            self.spans.append((base + line + 2, size))
            at = line + 4 + size
            if at <= len(rest) and rest[at - 2 : at] != b"\r\n":
                raise MalformedError("a chunk is not as long as it says")
        if len(rest) - at > _MAX_SIZE_LINE:
            raise MalformedError("a chunk's size has no end")
        self._keep(rest, at)
        return False

    def _end(self, rest: bytes, line: int, at: int) -> bool:
        """The last chunk has no data: from `line`, the end of its size, it is trailers up to an empty line."""
        end = rest.find(b"\r\n\r\n", line)
        if end < 0:
            self._keep(rest, at)
            return False
        self.extra = end + 4 < len(rest)
        return True

    def _keep(self, rest: bytes, at: int) -> None:
        self._next = self._base + at
        done = min(at, len(rest))
        self._base += done
        self._rest = rest[done:]


def _size(line: bytes) -> int:
    digits = line if line.isalnum() else line.partition(b";")[0].strip(b" \t")
    try:
        if digits.isalnum():
            return int(digits, 16)
    except ValueError:
        pass
    raise MalformedError(f"{line[:40]!r} is not the size of a chunk")


class RawAnswer:
    """A response as it is read from the socket."""

    __slots__ = ("chunks", "connect", "data", "head", "sent", "times")

    def __init__(self, sent: float, connect: float) -> None:
        self.sent = sent
        self.connect = connect
        self.times: list[float] = []
        """time.perf_counter of each read. A list of its own: tuples would be work for the garbage collector."""
        self.data: list[bytes] = []
        """What each read gave, the head included."""
        self.head: Head | None = None
        self.chunks: Chunks | None = None

    def parse(self) -> ParsedAnswer | None:
        """Of a complete response; None without a head."""
        head = self.head
        if head is None:
            return None
        raw = b"".join(self.data)
        if self.chunks is not None:
            spans = self.chunks.spans
        else:
            spans = [(head.start, len(raw) - head.start if head.length is None else head.length)]
        return ParsedAnswer(head, raw, spans, self)


class ParsedAnswer:
    """A complete response."""

    __slots__ = ("_raw", "_spans", "body", "head", "status")

    def __init__(self, head: Head, raw: bytes, spans: list[tuple[int, int]], answer: RawAnswer) -> None:
        self.head = head
        self.status = head.status
        self.body = b"".join([raw[start : start + size] for start, size in spans])
        self._spans = spans
        self._raw = answer

    def arrivals(self, ends: Iterable[int]) -> list[float]:
        """For ascending offsets into the body: when the bytes before each of them had arrived."""
        times, reads = iter(self._raw.times), accumulate(map(len, self._raw.data))
        spans = iter(self._spans)
        found: list[float] = []
        time, there = next(times), next(reads)  # so much of the response had come by then
        body = shift = 0  # the body up to here lies `shift` bytes further on in the response
        for end in ends:
            while body < end:
                start, size = next(spans)
                shift = start - body
                body += size
            while there < end + shift:
                time, there = next(times), next(reads)
            found.append(time)
        return found
