"""Bodies as requests: decoded, and refused where they ask for something that this server does not do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.front.bounded_json import check_json, decode_json

_LONGEST_NEUTRAL = 64
_R = TypeVar("_R")


def parse(body: bytes, kind: type[_R], unsupported: Mapping[str, tuple[str, ...]]) -> _R:
    """Decodes a body. `unsupported` names fields that are refused, each with the values that ask for nothing. Raises
    InvalidRequestError, UnsupportedError."""
    check_json(body)
    _refuse_unsupported(decode_json(body, dict[str, msgspec.Raw]), unsupported)
    return decode_json(body, kind)


def _refuse_unsupported(fields: Mapping[str, msgspec.Raw], table: Mapping[str, tuple[str, ...]]) -> None:
    """Raises UnsupportedError for the first field of a body that asks for something this server does not do."""
    for name in fields:
        neutral = table.get(name)
        if neutral is not None and _compact(fields[name]) not in neutral:
            if name == "functions" and _compact(fields[name]) == "[]":
                raise InvalidRequestError(f"'{name}' must not be an empty list.", param=name)
            raise UnsupportedError(f"'{name}' is not supported by this server with that value.", param=name)


def _compact(raw: msgspec.Raw) -> str:
    """The value without white space; anything long is not neutral anyway."""
    text = bytes(raw)
    if len(text) > _LONGEST_NEUTRAL:
        return ""
    return "".join(text.decode().split())
