"""A server with OpenAI's API that behaves as badly as it is told to, by the model that it is asked for."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

SECRET = "sk-the-key-for-the-other-server"
OK_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Asked(NamedTuple):
    line: str
    headers: dict[str, str]
    body: dict[str, Any]


class Caller(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    model: str


Behaviour = Callable[["BadServer", Asked, Caller], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(fields: dict[str, Any] | str) -> bytes:
    return b"data: " + (fields if isinstance(fields, str) else json.dumps(fields)).encode() + b"\n\n"


def delta(text: str | None, finish: str | None = None, index: int = 0) -> dict[str, Any]:
    content = {} if text is None else {"content": text}
    choice = {"index": index, "delta": content, "finish_reason": finish}
    return {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "inner-name", "choices": [choice]}


USAGE = {
    "id": "c1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "inner-name",
    "choices": [],
    "usage": {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
    },
}


def json_answer(status: int, fields: Any, *headers: str) -> bytes:
    body = json.dumps(fields).encode()
    lines = [f"HTTP/1.1 {status} Whatever", "content-type: application/json", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def whole(text: str = "all good") -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    answer = {"id": "c1", "object": "chat.completion", "created": 1, "model": "inner-name", "choices": [choice]}
    return answer | {"usage": usage}


async def _good(server: BadServer, asked: Asked, caller: Caller) -> None:
    if "/embeddings" in asked.line:
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}]
        usage = {"prompt_tokens": 3, "total_tokens": 3}
        answer = {"object": "list", "model": "inner-name", "data": data, "usage": usage}
        caller.writer.write(json_answer(200, answer))
        return
    if not asked.body.get("stream"):
        caller.writer.write(json_answer(200, whole()))
        return
    frames = [event(delta("all")), event(delta(" good")), event(delta(None, "stop")), event(USAGE), event("[DONE]")]
    caller.writer.write(OK_HEAD + b"".join(chunk(frame) for frame in frames) + b"0\r\n\r\n")


def raw(*pieces: bytes) -> Behaviour:
    async def behave(server: BadServer, asked: Asked, caller: Caller) -> None:
        for piece in pieces:
            caller.writer.write(piece)
            await caller.writer.drain()
        caller.writer.close()

    return behave


def first_fails(times: int, answer: bytes) -> Behaviour:
    """The first requests for the model get this; the later ones are answered well."""

    async def behave(server: BadServer, asked: Asked, caller: Caller) -> None:
        if server.counts[asked.body["model"]] <= times:
            caller.writer.write(answer)
        else:
            await _good(server, asked, caller)

    return behave


def _with_delta(fields: dict[str, Any]) -> bytes:
    found = delta(None)
    found["choices"][0]["delta"] = fields
    return event(found)


def _called(**piece: Any) -> bytes:
    return _with_delta({"tool_calls": [{"index": 0, **piece}]})


AGENT = [
    _with_delta({"reasoning_content": "Which "}),
    _with_delta({"reasoning_content": "city?"}),
    event(delta("Let me ")),
    event(delta("look.")),
    _called(id="call_1", type="function", function={"name": "weather", "arguments": ""}),
    _called(id="call_1", function={"name": "weather", "arguments": '{"city":'}),
    _called(function={"arguments": ' "Oslo"}'}),
    event(delta(None, "tool_calls")),
    event(USAGE),
    event("[DONE]"),
]
"""A thought, a text, and a call of a tool, of which one piece repeats the name."""


async def _silent(server: BadServer, asked: Asked, caller: Caller) -> None:
    await server.until_closed(caller)


async def _slow_after_first(server: BadServer, asked: Asked, caller: Caller) -> None:
    caller.writer.write(OK_HEAD + chunk(event(delta("one"))))
    await server.until_closed(caller)


async def _endless(server: BadServer, asked: Asked, caller: Caller) -> None:
    """Until its client leaves, or takes nothing more."""
    caller.writer.write(OK_HEAD)
    piece = chunk(event(delta("x" * 1000)))
    while not caller.writer.is_closing() and server.sent < 64 << 20:
        caller.writer.write(piece)
        server.sent += len(piece)
        await caller.writer.drain()
    await server.until_closed(caller)


ERROR = {"error": {"message": f"wrong key {SECRET} for it", "type": "x", "code": None}}
BEHAVIOURS: dict[str, Behaviour] = {
    "good": _good,
    "cut": raw(OK_HEAD + chunk(event(delta("half")))),
    "cut-before-text": raw(OK_HEAD),
    "garbage": raw(OK_HEAD + chunk(event(delta("fine"))) + chunk(event("{not json"))),
    "no-choices": raw(OK_HEAD + chunk(event({"hello": "world"}))),
    "no-http": raw(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "error-event": raw(OK_HEAD + chunk(event(delta("a"))) + chunk(event(ERROR)) + b"0\r\n\r\n"),
    "first-error-event": raw(OK_HEAD + chunk(event(ERROR)) + b"0\r\n\r\n"),
    "no-last-word": raw(OK_HEAD + chunk(event(delta("done", "stop"))) + b"0\r\n\r\n"),
    "no-end": raw(OK_HEAD + chunk(event(delta("more"))) + b"0\r\n\r\n"),
    "huge-header": raw(b"HTTP/1.1 200 OK\r\nx-large: " + b"y" * (1 << 20) + b"\r\n\r\n"),
    "huge-line": raw(OK_HEAD, *[chunk(b"data: " + b"z" * (1 << 19))] * 12),
    "no-stream": raw(json_answer(200, whole())),
    "zipped": raw(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc"),
    "503-then-ok": first_fails(1, json_answer(503, {"error": "busy"})),
    "429-then-ok": first_fails(1, json_answer(429, {"error": "slow down"}, "retry-after: 0.05")),
    "429": raw(json_answer(429, ERROR, "retry-after: 30")),
    "503-busy": raw(json_answer(503, ERROR, "retry-after: 30")),
    "500": raw(json_answer(500, ERROR)),
    "401": raw(json_answer(401, ERROR)),
    "400": raw(json_answer(400, {"error": {"message": f"temperature is wrong ({SECRET})", "param": "temperature"}})),
    "too-long": raw(json_answer(400, {"error": {"message": "too long", "code": "context_length_exceeded"}})),
    "silent": _silent,
    "slow": _slow_after_first,
    "endless": _endless,
    "agent": raw(OK_HEAD + b"".join(chunk(frame) for frame in AGENT) + b"0\r\n\r\n"),
}


class BadServer:
    """In a thread of its own. Models it does not know are answered well."""

    def __init__(self, always: str | Behaviour | None = None) -> None:
        """`always`: how it behaves whatever the model."""
        self._always = BEHAVIOURS[always] if isinstance(always, str) else always
        self.asked: list[Asked] = []
        self.counts: Counter[str] = Counter()
        """Requests by model."""
        self.closed: Counter[str] = Counter()
        """Of those that waited for it, the connections that their clients have closed, by model."""
        self.sent = 0
        self.port = 0
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._started.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def last(self, model: str) -> Asked:
        return [asked for asked in self.asked if asked.body.get("model") == model][-1]

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 24))
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def until_closed(self, caller: Caller) -> None:
        with suppress(ConnectionError):
            await caller.reader.read(1)
        self.closed[caller.model] += 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                line, *fields = head.rstrip("\r\n").split("\r\n")
                headers = {name.lower(): value for name, value in (field.split(": ", 1) for field in fields)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                asked = Asked(line, headers, json.loads(body or b"{}"))
                self.asked.append(asked)
                if line.startswith("GET"):
                    writer.write(json_answer(200, {"object": "list", "data": []}))
                    continue
                model = asked.body["model"]
                self.counts[model] += 1
                behaviour = self._always or BEHAVIOURS.get(model, _good)
                await behaviour(self, asked, Caller(reader, writer, model))
                await writer.drain()
        writer.close()


@contextmanager
def bad_server(always: str | None = None) -> Iterator[BadServer]:
    server = BadServer(always)
    try:
        yield server
    finally:
        server.stop()
