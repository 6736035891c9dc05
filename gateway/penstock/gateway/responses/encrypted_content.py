"""`encrypted_content` of reasoning items: the text as an opaque string, for clients that keep the conversation
themselves and send this back without `content`.

It is encoded and not encrypted. The client is shown the same text anyway, and may change it: it could as well send
another `content`. The text is shorter than the string, so a body's bound is its bound, too."""

from __future__ import annotations

from base64 import b64decode, b64encode

_PREFIX = "penstock1."
"""Tells these strings from those of other servers, and from later forms."""


def encode_reasoning(text: str) -> str:
    return _PREFIX + b64encode(text.encode()).decode()


def decode_reasoning(encoded: str) -> str:
    """Raises ValueError for what `encode_reasoning` does not make."""
    if not encoded.startswith(_PREFIX):
        raise ValueError("not from this server")
    return b64decode(encoded.removeprefix(_PREFIX), validate=True).decode()
