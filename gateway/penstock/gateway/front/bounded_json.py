"""Strict decoding of JSON bodies: every bad body is an InvalidRequestError, and none is echoed.

msgspec refuses NaN and Infinity, numbers out of range, lone surrogates, byte-order marks, bools and floats where an int
is due, numbers in strings, and trailing text. Added here: nesting depth, and UTF-8 also in fields that nobody reads.
Of duplicate keys the last one wins, as in every common JSON library.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.engines.errors import InvalidRequestError

MAX_DEPTH = 100
"""Triton's limit."""

_T = TypeVar("_T")
_QUOTE, _COLON = b'":'
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_AT_PATH = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")


def decode_json(body: bytes, kind: type[_T]) -> _T:
    """Decodes a whole body. Raises InvalidRequestError; `param` names the offending field where there is one."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        detail = str(error) if isinstance(error, msgspec.DecodeError) else "it cannot be decoded"
        raise InvalidRequestError(f"The request body is not valid JSON: {detail}.") from None


def check_json(body: bytes, most_members: int | None = None) -> None:
    """Raises InvalidRequestError for bodies that are not UTF-8 or nest deeper than MAX_DEPTH, and for more members in
    all their objects than that: a few bytes each, they become hundreds when they are decoded."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError:
            raise InvalidRequestError("The request body is not valid UTF-8.") from None
    deep = body.count(b"[") + body.count(b"{") > MAX_DEPTH
    limit = len(body) if most_members is None else most_members
    many = body.count(b":") > limit
    if not deep and not many:
        return
    plain = _outside_strings(body)
    if deep and _depth(plain) > MAX_DEPTH:
        raise InvalidRequestError(f"The request body nests deeper than {MAX_DEPTH} levels.")
    if many and np.count_nonzero(plain == _COLON) > limit:
        raise InvalidRequestError(f"The request body has more than {limit} members.")


def _outside_strings(body: bytes) -> NDArray[np.uint8]:
    """The body without its strings (their last quotes stay), in a few times its memory however many there are."""
    if b"\\" in body:
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    found = np.frombuffer(body, np.uint8)
    inside = np.bitwise_xor.accumulate((found == _QUOTE).view(np.uint8))
    plain: NDArray[np.uint8] = found[inside == 0]
    return plain


def _depth(plain: NDArray[np.uint8]) -> int:
    steps = np.frombuffer(plain.tobytes().translate(_STEPS, _NOT_BRACKETS), np.int8)
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))


def _explained(message: str) -> InvalidRequestError:
    at = _AT_PATH.search(message)
    param = at.group(1) if at else None
    text = message[: at.start()] if at else message
    if text.startswith("Invalid enum value"):  # the value stands behind that
        text = "Invalid value"
    missing = _MISSING.search(text)
    if missing:
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return InvalidRequestError(f"Missing required parameter: {param}.", param=param)
    where = f"{param}: " if param else "The request body: "
    return InvalidRequestError(f"{where}{text[0].lower()}{text[1:]}.", param=param)
