"""Bodies of HTTP requests as Triton's clients send them."""

from __future__ import annotations

from typing import Any

from penstock.engines.errors import InvalidRequestError, PayloadTooLargeError
from penstock.gateway.front.bounded_json import decode_json
from penstock.gateway.front.call import Call
from penstock.gateway.http.exchange import Exchange


async def read_input(exchange: Exchange, call: Call, limit: int, coding: bytes = b"") -> bytes:
    """The body of a request for inference, which has this coding; from its end on the call is watched.

    Raises InvalidRequestError, OverloadedError, ClientGone, and PayloadTooLargeError with the flag that sets the limit:
    users of servers without one do not know it.
    """
    try:
        body = await exchange.read(limit)
        call.watch()
        return await exchange.decompressed(coding, body, limit) if coding else body
    except PayloadTooLargeError as error:
        raise PayloadTooLargeError(f"{error.message} --http-max-input-size sets the limit.") from None


async def read_object(exchange: Exchange, limit: int, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object in a body of any content type; `optional`: an empty body, or null, is an empty object.

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
