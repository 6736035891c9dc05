"""What clients attach to a request for themselves."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.front.context import RequestContext

_MAX_PAIRS = 16
_MAX_KEY, _MAX_VALUE = 64, 512


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """OpenAI's bounds. Raises InvalidRequestError."""
    given = metadata or {}
    if len(given) > _MAX_PAIRS:
        raise InvalidRequestError(f"metadata: at most {_MAX_PAIRS} pairs are allowed.", param="metadata")
    if any(len(key) > _MAX_KEY or len(value) > _MAX_VALUE for key, value in given.items()):
        message = f"metadata: keys may have {_MAX_KEY} characters, values {_MAX_VALUE}."
        raise InvalidRequestError(message, param="metadata")


def kept_metadata(metadata: object, context: RequestContext) -> dict[str, str]:
    """What of it is texts within OpenAI's bounds."""
    if not metadata:
        return {}
    pairs = metadata.items() if isinstance(metadata, dict) else ()
    kept = dict([pair for pair in pairs if all(map(isinstance, pair, (str, str)))][:_MAX_PAIRS])
    kept = {key: value for key, value in kept.items() if len(key) <= _MAX_KEY and len(value) <= _MAX_VALUE}
    if kept != metadata:
        context.ignore("metadata", f"up to {_MAX_PAIRS} texts of {_MAX_VALUE} characters are kept.")
    return kept


def with_metadata(body: bytes, metadata: Mapping[str, str]) -> bytes:
    """A JSON object with this as one more field."""
    return body[:-1] + b',"metadata":' + msgspec.json.encode(metadata) + b"}"
