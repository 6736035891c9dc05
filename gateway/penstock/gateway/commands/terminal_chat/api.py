"""The two calls that a chat needs, on Python's own HTTP client."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class ChatError(Exception):
    """Why there is no answer, in one line for the user."""


_CONNECT_SECONDS = 10.0
_MOST_TEXT = 300


class Piece(NamedTuple):
    """A part of an answer, in the order of the stream."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None


class ChatApi:
    def __init__(self, url: str, api_key: str | None = None) -> None:
        """`url` is the server's, with or without /v1. Raises ChatError for one that cannot be."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            self._port = parts.port
        except ValueError:
            raise ChatError(f"{url} is no URL: its port is not a number from 0 to 65535") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatError(f"{url} is no URL of a server, such as http://127.0.0.1:8000")
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def first_model(self) -> str:
        """Raises ChatError."""
        with closing(self._connect()) as connection:
            listing = _json(self._call(connection, "GET", "/models").read())
        models = listing.get("data") or ()
        if not models:
            raise ChatError(f"the server at {self._url} has no model yet")
        return str(models[0]["id"])

    def answer(self, body: dict[str, Any]) -> Generator[Piece]:
        """Streams it. To close the iterator stops the answer. Raises ChatError, also when it ends early."""
        with closing(self._connect()) as connection:
            response = self._call(connection, "POST", "/chat/completions", json.dumps(body | {"stream": True}))
            finished = False
            for event in self._events(response):
                piece = _piece(event)
                finished = finished or piece.finish_reason is not None
                yield piece
            if not finished:
                raise ChatError("the server closed the connection before the answer was complete")

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_CONNECT_SECONDS)
        try:
            connection.connect()
        except OSError as error:
            raise ChatError(
                f"no server answers at {self._url} ({error.strerror or error}). Start one with: penstock serve"
            ) from None
        connection.sock.settimeout(None)  # an answer may take long to begin
        return connection

    def _call(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: str | None = None
    ) -> http.client.HTTPResponse:
        try:
            connection.request(method, self._path + path, body and body.encode(), self._headers)
            response = connection.getresponse()
            if response.status == 200:
                return response
            text = _message(response.read())
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"the server at {self._url} does not speak HTTP as expected: {error}") from None
        if response.status == 401:
            text += " Pass a key with --api-key."
        raise ChatError(f"{response.status} {response.reason}: {text}")

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """The chunks of a stream."""
        try:
            while line := response.readline():
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if data and line.startswith(b"data:"):
                    yield _json(data)
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"the connection broke: {error}") from None


def _piece(event: dict[str, Any]) -> Piece:
    if "error" in event:
        raise ChatError(_message(json.dumps(event).encode()))
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return Piece(
        delta.get("content") or "",
        delta.get("reasoning_content") or delta.get("reasoning") or "",
        choices[0].get("finish_reason"),
    )


def _message(body: bytes) -> str:
    """What an error's body says, in one line."""
    try:
        error = json.loads(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(text.split())[:_MOST_TEXT]


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ChatError("the answer is not in the format of the OpenAI API")
    return value
