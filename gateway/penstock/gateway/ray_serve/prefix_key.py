"""The routing key of a request: hashes of its prompt's beginnings, of which two prompts have as many in common as they
begin alike, and of its session.

The proxies compute them, since only they see bodies, and the request router compares them.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

MARK = "penstock1:"
"""What such a value begins with."""


@dataclass(frozen=True, slots=True)
class RouteKey:
    hashes: tuple[str, ...] = ()
    """Of the prompt's beginnings, the shortest first, and last that of the session."""
    avoid: tuple[str, ...] = ()
    """Names of replicas that could not serve the request."""

    def __str__(self) -> str:
        return f"{MARK}{'.'.join(self.hashes)};{'.'.join(self.avoid)}" if self.hashes or self.avoid else ""

    @classmethod
    def read(cls, text: str) -> RouteKey:
        """Also from the name of a session, which no proxy of ours has seen."""
        if not text.startswith(MARK):
            return cls((session_hash(text),) if text else ())
        hashes, _, avoid = text.removeprefix(MARK).partition(";")
        return cls(_names(hashes), _names(avoid))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(".")) if text else ()


LARGEST_BODY = 1 << 20
"""Bytes of bodies that are looked into."""
_FIRST_STEP = 256
_EVEN_STEPS = 32
_GROWTH = 1.1
_MOST_BYTES = 1 << 20
_DIGEST_BYTES = 6
_FIELDS = ("model", "tools", "system", "instructions", "messages", "prompt", "input")
"""In the order in which templates put them into a prompt."""


class _Body(msgspec.Struct):
    """What routing looks at; fields of any type, since the replica says what is wrong with them."""

    model: Any = None
    tools: Any = None
    system: Any = None
    instructions: Any = None
    messages: Any = None
    prompt: Any = None
    input: Any = None
    prompt_cache_key: Any = None


_decode = msgspec.json.Decoder(_Body).decode
_encode = msgspec.json.Encoder().encode


def session_hash(session: str) -> str:
    return _short(hashlib.blake2b(b"session\0" + session.encode(), digest_size=_DIGEST_BYTES))


def request_hashes(body: bytes, session: str | None) -> tuple[str, ...]:
    """Of the prompt's beginnings, the shortest first, and last that of the session: what a header says (`session`), or
    else the body's `prompt_cache_key`."""
    try:
        request = _decode(body)
    except msgspec.MsgspecError:
        return (session_hash(session),) if session else ()
    if session is None and isinstance(request.prompt_cache_key, str):
        session = request.prompt_cache_key
    of_session = [session_hash(session)] if session else []
    return (*prefix_hashes(_text(request)), *of_session)


def _text(request: _Body) -> bytes:
    """Grows at its end when messages are added to a conversation, apart from the brackets that close a list."""
    return b"\0".join(_encode(value).rstrip(b"]}") for name in _FIELDS if (value := getattr(request, name)) is not None)


def prefix_hashes(text: bytes) -> Iterator[str]:
    running = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    begin = 0
    for end in _BOUNDS:
        if end > len(text):
            return
        running.update(text[begin:end])
        yield _short(running)
        begin = end


def _short(hashed: Any) -> str:
    return b64encode(hashed.digest(), b"-_").decode()


def _bounds() -> tuple[int, ...]:
    """Even steps while prompts are short, and then growing ones, so that a header has room for all."""
    bounds = [_FIRST_STEP * number for number in range(1, _EVEN_STEPS + 1)]
    while bounds[-1] < _MOST_BYTES:
        bounds.append(int(bounds[-1] * _GROWTH))
    return tuple(bounds)


_BOUNDS = _bounds()
