"""Server-sent events of a complete answer (WHATWG HTML, section 9.2), with the time at which each had arrived."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate

from penstock.loadtest.clients.response import HttpResponse

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
        ends = [found.end() for found in _EMPTY_LINE.finditer(body)]
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
