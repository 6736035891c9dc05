"""Strict decoding of JSON from clients: all that is bad is an InvalidRequestError, and none of it is echoed but names.

msgspec refuses NaN and Infinity, numbers out of range, lone surrogates, byte-order marks, bools and floats where an int
is due, numbers in strings, and trailing text. Added here: nesting depth, and UTF-8 also in fields that nobody reads.
Of duplicate keys the last one wins, as in every common JSON library; `has_all_members` tells of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.engines.errors import InvalidRequestError

MAX_DEPTH = 100
"""Triton's limit."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""What editors and shells of Windows write before UTF-8; where it is allowed, it is cut off before the text is read."""

_MOST_ECHOED = 64
_T = TypeVar("_T")
_BODY = "The request body"
_QUOTE, _COLON = b'":'
_NOT_STRUCTURE = bytes(set(range(256)) - set(b"[]{}:"))
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_STEPS_AND_COLONS = bytes.maketrans(b"[{]}:", b"\x01\x01\xff\xff\0")
_AT_PATH = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")


def decode_json(text: bytes, kind: type[_T], *, field: str | None = None, most_members: int | None = None) -> _T:
    """Decodes a request's body, or the JSON text in a `field` of it.

    Raises InvalidRequestError for what `check_json` refuses, what is not JSON, and values that do not fit `kind`.
    Its `param` names the offending field where there is one.
    """
    check_json(text, field=field, most_members=most_members)
    return decode_checked(text, kind, field=field)


def decode_checked(
    text: bytes, kind: type[_T], *, field: str | None = None, read: Callable[[type, Any], Any] | None = None
) -> _T:
    """As `decode_json`, for part of a text that has passed it, such as a `Raw`. `read` makes values of types that are
    not JSON's, each as soon as its text was decoded. Raises InvalidRequestError."""
    try:
        return msgspec.json.decode(text, type=kind, dec_hook=read)
    except msgspec.ValidationError as error:
        raise _explained(str(error), field) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        detail = str(error) if isinstance(error, msgspec.DecodeError) else "it cannot be decoded"
        raise InvalidRequestError(f"{field or _BODY} is not valid JSON: {detail}.", param=field) from None


def echoed(value: str) -> str:
    """The beginning of a client's own text, to name it in an error: nothing in it disturbs a log or a terminal."""
    return "`" + "".join([char if char.isprintable() else "?" for char in value[:_MOST_ECHOED]]) + "`"


def check_json(text: bytes, *, field: str | None = None, most_members: int | None = None) -> None:
    """What decoding would not refuse, or only when it has cost too much. Raises InvalidRequestError for a text that is
    not UTF-8, nests deeper than MAX_DEPTH, or has more than `most_members` in all its objects together: a member is a
    few bytes, and hundreds when it is decoded."""
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError:
            raise InvalidRequestError(f"{field or _BODY} is not valid UTF-8.", param=field) from None
    deep = text.count(b"[") + text.count(b"{") > MAX_DEPTH
    limit = len(text) if most_members is None else most_members
    many = text.count(b":") > limit
    if not deep and not many:
        return
    plain = _outside_strings(text)
    if deep and _depth(plain) > MAX_DEPTH:
        raise InvalidRequestError(f"{field or _BODY} nests deeper than {MAX_DEPTH} levels.", param=field)
    if many and np.count_nonzero(plain == _COLON) > limit:
        raise InvalidRequestError(f"{field or _BODY} has more than {limit} members.", param=field)


def has_all_members(text: bytes, kept: int) -> bool:
    """Whether an object that `check_json` lets through has no more members than were `kept` of it: a key that stands
    in it twice is kept once. Of most texts one count says that."""
    if text.count(b":") == kept:
        return True
    plain = np.frombuffer(_outside_strings(text).tobytes().translate(None, _NOT_STRUCTURE), np.uint8)
    steps = np.frombuffer(plain.tobytes().translate(_STEPS_AND_COLONS), np.int8)
    depth = np.cumsum(steps, dtype=np.int8)  # at most MAX_DEPTH
    return int(np.count_nonzero((plain == _COLON) & (depth == 1))) == kept


def _outside_strings(text: bytes) -> NDArray[np.uint8]:
    """The text without its strings (their last quotes stay), in a few times its memory however many there are."""
    if b"\\" in text:
        text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    characters = np.frombuffer(text, np.uint8)
    inside = np.bitwise_xor.accumulate((characters == _QUOTE).view(np.uint8))
    plain: NDArray[np.uint8] = characters[inside == 0]
    return plain


def _depth(plain: NDArray[np.uint8]) -> int:
    steps = np.frombuffer(plain.tobytes().translate(_STEPS, _NOT_BRACKETS), np.int8)
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))


def _explained(message: str, field: str | None) -> InvalidRequestError:
    at = _AT_PATH.search(message)
    param = ".".join(filter(None, (field, at and at.group(1)))) or None
    text = message[: at.start()] if at else message
    if text.startswith("Invalid enum value"):  # the value stands behind that
        text = "Invalid value"
    missing = _MISSING.search(text)
    if missing:
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return InvalidRequestError(f"Missing required parameter: {param}.", param=param)
    return InvalidRequestError(f"{param or _BODY}: {text[0].lower()}{text[1:]}.", param=param)
