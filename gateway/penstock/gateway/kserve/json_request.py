"""JSON bodies as Triton's clients send them: of any content type, never compressed, sometimes empty."""

from __future__ import annotations

from typing import Any

from penstock.engines.errors import InvalidRequestError, PayloadTooLargeError
from penstock.gateway.http.exchange import ClientGone, Exchange
from penstock.gateway.http.json_body import check_json, decode_json


async def read_object(exchange: Exchange, limit: int, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object in the body; `optional`: an empty body is an empty object.

    Raises InvalidRequestError, PayloadTooLargeError, and ClientGone when the client leaves before the end.
    """
    body = await _read(exchange, limit)
    if optional and not body.strip():
        return {}
    check_json(body)
    return decode_json(body, dict[str, Any])


async def _read(exchange: Exchange, limit: int) -> bytes:
    encoding = exchange.header(b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        raise InvalidRequestError("Unsupported content-encoding, only 'identity' is supported.")
    length = exchange.header(b"content-length") or b"0"
    if not length.isdigit() or len(length) > 19:
        raise InvalidRequestError("Content-Length is not a number.")
    size = int(length)
    chunks: list[bytes] = []
    received, more = 0, True
    while more:
        if size > limit:
            raise PayloadTooLargeError(
                f"request size {size} exceeds the maximum allowed input size of {limit}. Use --http-max-input-size to "
                "increase the limit."
            )
        message = await exchange.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        chunks.append(chunk)
        received += len(chunk)
        size = max(size, received)
        more = message.get("more_body", False) or size > limit
    return b"".join(chunks)
