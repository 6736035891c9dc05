"""JSON bodies as Triton's clients send them: of any content type, never compressed, sometimes empty."""

from __future__ import annotations

from typing import Any

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.requests.bounded_json import decode_json
from penstock.gateway.transports.http.exchange import Exchange


async def read_object(exchange: Exchange, limit: int, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object in the body; `optional`: an empty body, or null, is an empty object.

    Raises InvalidRequestError, PayloadTooLargeError, and ClientGone when the client leaves before the end.
    """
    check_plain(exchange)
    body = await exchange.read(limit)
    if optional and body.strip() in (b"", b"null"):
        return {}
    return decode_json(body, dict[str, Any])


def check_plain(exchange: Exchange) -> None:
    """Raises InvalidRequestError for a body that is compressed."""
    encoding = exchange.headers.get(b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        raise InvalidRequestError("Unsupported content-encoding, only 'identity' is supported.")


def no_more(body: dict[str, Any]) -> None:
    """Raises InvalidRequestError when something is left that nobody has taken."""
    if body:
        raise InvalidRequestError(f"unknown field '{next(iter(body))[:64]}' in the request")
