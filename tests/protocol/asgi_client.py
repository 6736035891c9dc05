"""Calls an ASGI app directly and keeps each message it sends, so that tests see what leaves together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message


class AsgiCall:
    """One request. `disconnect()` lets the client leave; so does a None among the body's chunks."""

    def __init__(
        self,
        app: ASGIApp,
        path: str,
        body: bytes | dict[str, Any] | Sequence[bytes | None] = b"",
        method: str = "POST",
        headers: dict[str, str] | None = None,
    ) -> None:
        whole = json.dumps(body).encode() if isinstance(body, dict) else body
        self._chunks: list[bytes | None] = [whole] if isinstance(whole, bytes) else list(whole)
        self._gone = asyncio.Event()
        self.messages: list[Message] = []
        self.sent = asyncio.Event()
        self._app = app
        path, _, query = path.partition("?")
        self._scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(key.lower().encode(), value.encode()) for key, value in (headers or {}).items()],
        }

    async def _receive(self) -> Message:
        if self._chunks:
            chunk = self._chunks.pop(0)
            if chunk is None:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": chunk, "more_body": bool(self._chunks)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.messages.append(message)
        self.sent.set()

    async def run(self) -> AsgiCall:
        await self._app(self._scope, self._receive, self._send)
        return self

    def disconnect(self) -> None:
        self._gone.set()

    @property
    def unread(self) -> int:
        """Chunks of the body that nobody asked for."""
        return len(self._chunks)

    @property
    def status(self) -> int:
        status: int = self.messages[0]["status"]
        return status

    @property
    def headers(self) -> dict[str, str]:
        return {key.decode(): value.decode() for key, value in self.messages[0]["headers"]}

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages[1:]]

    @property
    def complete(self) -> bool:
        return len(self.messages) > 1 and not self.messages[-1]["more_body"]

    def json(self) -> Any:
        return json.loads(b"".join(self.bodies))

    def events(self) -> list[Any]:
        """The data of each server-sent event, decoded; `[DONE]` as it is, and no comments."""
        events = b"".join(self.bodies).decode().split("\n\n")
        assert events.pop() == ""
        data = [event.removeprefix("data: ") for event in events if not event.startswith(":")]
        return [each if each == "[DONE]" else json.loads(each) for each in data]


async def call(app: ASGIApp, path: str, body: Any = b"", **options: Any) -> AsgiCall:
    return await AsgiCall(app, path, body, **options).run()
