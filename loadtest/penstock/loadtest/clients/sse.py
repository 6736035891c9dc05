"""Server-sent events of a complete answer (WHATWG HTML, section 9.2), with the time at which each had arrived."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from penstock.loadtest.clients.http1 import ParsedAnswer


def events(answer: ParsedAnswer) -> Iterator[tuple[float, bytes]]:
    """(arrival, data) of each event that has data; comments and other fields are left out."""
    body = answer.body
    separator = b"\r\n\r\n" if b"\r\n\r\n" in body else b"\n\n"
    blocks = body.split(separator)
    blocks.pop()  # what follows the last separator is no event: it broke off
    ends = accumulate(len(block) + len(separator) for block in blocks)
    for time, block in zip(answer.arrivals(ends), blocks, strict=True):
        data = _data(block)
        if data:
            yield time, data


def _data(block: bytes) -> bytes:
    if block.startswith(b"data: ") and b"\n" not in block:  # what all servers send
        return block[6:]
    lines = block.replace(b"\r\n", b"\n").split(b"\n")
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
