"""A running server's port for metrics and operators, as commands read it."""

from __future__ import annotations

import http.client
import time
from contextlib import closing, suppress
from urllib.parse import SplitResult, urlsplit

MOST_BYTES = 8 << 20
"""Of an answer: the rest of a longer one is left out."""
_PATIENCE = 10.0
"""Seconds for each answer."""
_MOST_TEXT = 200


def parse_url(text: str) -> SplitResult:
    """Raises ValueError for what is no URL of a server. `http://` may be left out."""
    with suppress(ValueError):
        url = urlsplit(text if "//" in text else f"http://{text}")
        _ = url.port  # raises ValueError, too
        if url.scheme in ("http", "https") and url.hostname:
            return url
    raise ValueError(f"{text} is no URL of a server, such as http://127.0.0.1:8002")


def fetch(url: SplitResult, path: str, key: str | None) -> str:
    """The text at `path` below the server's URL. Raises OSError, HTTPException, and ValueError for another status than
    200."""
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    ends = time.monotonic() + _PATIENCE
    with closing(kind(url.hostname or "", url.port, timeout=_PATIENCE)) as connection:
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection.request("GET", url.path.rstrip("/") + path, headers=headers)
        response = connection.getresponse()
        data = bytearray()
        while len(data) < MOST_BYTES and (part := response.read1(1 << 16)):
            data += part
            if time.monotonic() > ends:
                raise TimeoutError(f"it did not end within {_PATIENCE:g} s")
    text = data.decode("utf-8", "replace")
    if response.status != 200:
        raise ValueError(f"status {response.status}: {text[:_MOST_TEXT]}")
    return text
