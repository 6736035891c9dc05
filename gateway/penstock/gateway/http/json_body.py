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

from penstock.engines.errors import InvalidRequestError

MAX_DEPTH = 100
"""Triton's limit."""

_T = TypeVar("_T")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A string, or what an unterminated one leaves: never fails after its opening quote, so the scan stays linear."""
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1
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


def check_json(body: bytes) -> None:
    """Raises InvalidRequestError for bodies that are not UTF-8 or nest deeper than MAX_DEPTH."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError:
            raise InvalidRequestError("The request body is not valid UTF-8.") from None
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _depth(body) > MAX_DEPTH:
        raise InvalidRequestError(f"The request body nests deeper than {MAX_DEPTH} levels.")


def _depth(body: bytes) -> int:
    brackets = _STRING.sub(b"", body).translate(None, _NOT_BRACKETS)
    steps = _STEP[np.frombuffer(brackets, np.uint8)]
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))


def _explained(message: str) -> InvalidRequestError:
    at = _AT_PATH.search(message)
    param = at.group(1) if at else None
    text = message[: at.start()] if at else message
    missing = _MISSING.search(text)
    if missing:
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return InvalidRequestError(f"Missing required parameter: {param}.", param=param)
    where = f"{param}: " if param else "The request body: "
    return InvalidRequestError(f"{where}{text[0].lower()}{text[1:]}.", param=param)
