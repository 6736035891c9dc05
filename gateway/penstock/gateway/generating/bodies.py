"""Bodies as requests: decoded, and refused where they ask for something that this server does not do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.front.bounded_json import decode_checked, decode_json

_LONGEST_NEUTRAL = 64
_LONGEST_OPTIONS = 4096
_WHOLE = re.compile(r"(-?[0-9]+)\.0+")
_R = TypeVar("_R")


def parse(body: bytes, kind: type[_R], unsupported: Mapping[str, tuple[str, ...]]) -> _R:
    """Decodes a body. `unsupported` names fields that are refused, each with the values that ask for nothing. Raises
    InvalidRequestError, UnsupportedError."""
    fields = decode_json(body, dict[str, msgspec.Raw])
    _refuse_unsupported(fields, unsupported)
    try:
        return decode_checked(body, kind)
    except InvalidRequestError:
        whole = _whole_numbers(fields)
        if not whole:
            raise
        return decode_checked(msgspec.json.encode(fields | whole), kind)


def _whole_numbers(fields: Mapping[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """Those that are written as floats, such as 1.0, in their shorter form: clients without integers send such. Also
    those in objects of options, which are short."""
    short = {name: _compact(raw) for name, raw in fields.items()}
    whole = {
        name: msgspec.Raw(_as_whole(number).encode()) for name, number in short.items() if _WHOLE.fullmatch(number)
    }
    for name, raw in fields.items():
        if bytes(memoryview(raw)[:1]) == b"{" and memoryview(raw).nbytes <= _LONGEST_OPTIONS:
            options = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            inner = _whole_numbers(options)
            if inner:
                whole[name] = msgspec.Raw(msgspec.json.encode(options | inner))
    return whole


def _as_whole(number: str) -> str:
    whole = _WHOLE.fullmatch(number)
    return whole[1] if whole else number


def _refuse_unsupported(fields: Mapping[str, msgspec.Raw], table: Mapping[str, tuple[str, ...]]) -> None:
    """Raises UnsupportedError for the first field of a body that asks for something this server does not do."""
    for name in fields:
        neutral = table.get(name)
        if neutral is not None and _as_whole(_compact(fields[name])) not in neutral:
            raise UnsupportedError(f"'{name}' is not supported by this server with that value.", param=name)


def _compact(raw: msgspec.Raw) -> str:
    """The value without white space; anything long is not neutral anyway."""
    if memoryview(raw).nbytes > _LONGEST_NEUTRAL:
        return ""
    return "".join(bytes(raw).decode().split())


def media_note(kind: str) -> str:
    """What the model reads in place of an image, a recording or a file, which is neither fetched nor decoded."""
    return f"[{kind} left out: this model reads text only]"
