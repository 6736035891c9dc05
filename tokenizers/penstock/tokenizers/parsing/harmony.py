"""Messages of OpenAI's harmony format, which gpt-oss writes."""

from __future__ import annotations

import re
from typing import NamedTuple

from .reader import Reader, Reading, Tags

MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
OPENINGS = MARKERS[:2]
CLOSINGS = MARKERS[4:]
START = Tags(*OPENINGS, " to=")
"""What the first message may begin with: the prompt has `<|start|>assistant` already."""
CONTENT_END = Tags(*OPENINGS, *CLOSINGS)
_IN_HEADER = Tags("<|channel|>", "<|constrain|>", "<|message|>")
_WORDS = re.compile(r"[^<>\n]*")
_LONGEST_WORDS = 256
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class Header(NamedTuple):
    """What stands before a message's content."""

    channel: str
    recipient: str | None
    """Who is called: `functions.NAME`, or a tool that is built in."""


def read_header(reader: Reader, opening: str) -> Reading[Header | None]:
    """Behind the opening, which is the start of a message or its channel. None if this is no header."""
    header, tag = opening, None
    for _ in range(4):
        words = yield from reader.word(_WORDS, _LONGEST_WORDS)
        tag = yield from reader.one_of(_IN_HEADER)
        header += words + (tag or "")
        if tag is None or tag == "<|message|>":
            break
    if tag != "<|message|>":
        return None
    recipient, channel = _RECIPIENT.search(header.replace("<|", " <|")), _CHANNEL.search(header)
    return Header(channel[1] if channel else "", recipient[1] if recipient else None)
