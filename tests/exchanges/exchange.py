"""Exchanges: one request to a server and all that came back, as plain data without ids and times.

A recorded answer keeps status, headers in order, and bodies with the order of their members. Two things depend on the
machine and are evened out: values that no two runs share become their type (`<id>`, `<time>`), and events of a stream
that continue the same text become one, since how many tokens share an event depends on speed.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.events
import httpx

from penstock.engines import __version__
from support.server import Server

VARIES = {
    "created", "created_at", "completed_at", "finished_at", "expires_at", "in_progress_at", "finalizing_at", "date",
    "total_duration", "load_duration", "prompt_eval_duration", "eval_duration", "modified_at", "ended_at",
    "cached_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "cache_write_tokens", "nonce",
}  # fmt: skip
"""Members of a body whose values differ between runs. Cached tokens depend on what was asked before."""
VARYING_HEADERS = {"date", "x-request-id", "content-length", "request-id", "openai-processing-ms", "retry-after"}
ID = re.compile(r"\b((?:[a-z]+[-_])*)[0-9a-f]{24,}\b|\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b")
FRAME = 16384
"""Bytes of a frame, HTTP/2's default. A body of more than 64 KiB would need credit."""
TEXT_MEMBERS = {"content", "text", "delta", "thinking", "reasoning_content", "partial_json", "arguments", "response",
                "text_output"}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """An HTTP request. `body` is sent as JSON unless it is bytes."""

    path: str
    body: Any = None
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes | None:
        return self.body if isinstance(self.body, bytes | None) else json.dumps(self.body).encode()

    @property
    def all_headers(self) -> dict[str, str]:
        kind = {"content-type": "application/json"} if self.body is not None else {}
        return {"accept-encoding": "identity", **kind, **self.headers}


@dataclass(frozen=True)
class Exchange:
    """One named request; `run` sends it and gives the answer as plain data."""

    name: str
    run: Callable[[Server], Any]
    request: Request | None = None
    """Of exchanges that are one HTTP request: the same goes over HTTP/2."""


def over_http1(server: Server, request: Request) -> Any:
    with httpx.Client(timeout=60) as client:
        answer = client.request(
            request.method, server.url + request.path, content=request.content, headers=request.all_headers
        )
    return shown(answer.status_code, [(k.decode(), v.decode()) for k, v in answer.headers.raw], answer.content)


def over_http2(server: Server, request: Request) -> Any:
    """By prior knowledge, as gRPC's clients and proxies connect."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    with socket.create_connection(("127.0.0.1", server.http_port), 60) as peer:
        connection.initiate_connection()
        pseudo = {":method": request.method, ":path": request.path, ":scheme": "http", ":authority": "localhost"}
        content = request.content
        connection.send_headers(1, [*pseudo.items(), *request.all_headers.items()], end_stream=content is None)
        for start in range(0, len(content or b"x"), FRAME) if content is not None else ():
            connection.send_data(1, content[start : start + FRAME], end_stream=start + FRAME >= len(content))
        peer.sendall(connection.data_to_send())
        return _read_http2(connection, peer)


def _read_http2(connection: h2.connection.H2Connection, peer: socket.socket) -> Any:
    headers: list[tuple[str, str]] = []
    content = b""
    while True:
        received = peer.recv(65536)
        for event in connection.receive_data(received):
            if isinstance(event, h2.events.ResponseReceived):
                headers = [(str(name), str(value)) for name, value in event.headers]
            elif isinstance(event, h2.events.DataReceived):
                content += event.data
                connection.acknowledge_received_data(event.flow_controlled_length, 1)
            elif isinstance(event, h2.events.StreamReset):
                return {"reset": int(event.error_code)}
            elif isinstance(event, h2.events.StreamEnded):
                return shown(int(dict(headers)[":status"]), [h for h in headers if h[0] != ":status"], content)
        peer.sendall(connection.data_to_send())
        assert received, "the server closed the connection"


def shown(code: int, headers: Sequence[tuple[str, str]], content: bytes) -> dict[str, Any]:
    kind = next((value for name, value in headers if name == "content-type"), "")
    return {"status": code, "headers": [_header(*pair) for pair in headers], "body": _body(kind, headers, content)}


def _header(name: str, value: str) -> str:
    return f"{name}: {'<varies>' if name in VARYING_HEADERS else steady(value)}"


def _body(kind: str, headers: Sequence[tuple[str, str]], content: bytes) -> Any:
    length = dict(headers).get("inference-header-content-length")
    if length is not None:
        return {"json": _json(content[: int(length)]), "binary": content[int(length) :].hex()}
    if kind.startswith("text/event-stream"):
        return merged(list(_pieces([_event(block) for block in content.decode().split("\n\n") if block])))
    if kind.startswith("application/x-ndjson"):
        return merged([_json(line) for line in content.splitlines()])
    return _json(content)


def _pieces(events: Sequence[Any]) -> Iterator[Any]:
    """Events in the smallest parts that tokens can share an event in, without those that a timer sends."""
    envelope: Any = None
    numbers = [event["data"].pop("sequence_number") for event in events if _is_numbered(event)]
    assert numbers == list(range(len(numbers))), "sequence numbers count the events"
    for event in events:
        data = event.get("data")
        kind = data.get("object", data.get("type")) if isinstance(data, dict) else None
        if kind in ("chat.completion.chunk", "text_completion"):
            first, *pieces = _chunk_pieces(data)
            yield from pieces if first == envelope else [first, *pieces]
            envelope = first
        elif kind == "message_start":  # it counts the tokens that are there when it is written
            data["message"]["usage"]["output_tokens"] = "<int>"
            yield event
        elif kind != "ping":
            yield event


def _is_numbered(event: Any) -> bool:
    data = event.get("data")
    return isinstance(data, dict) and "sequence_number" in data


def _chunk_pieces(chunk: dict[str, Any]) -> Iterator[Any]:
    """The envelope, which all chunks share, then each choice's role, texts, calls and end by themselves."""
    yield {key: value for key, value in chunk.items() if key != "choices"}
    for choice in chunk["choices"]:
        delta = choice.get("delta", {"text": choice.get("text")})
        calls = delta.get("tool_calls", [])
        ended = {key: choice[key] for key in ("finish_reason", "stop_reason") if choice.get(key) is not None}
        rest = {key: value for key, value in delta.items() if key != "tool_calls" and value != ""}
        for call in calls:
            arguments = call["function"].pop("arguments", "")
            rest_of_call = {key: value for key, value in call.items() if value and key != "index"}
            yield from [{"index": choice["index"], "call": call["index"], **rest_of_call}] if rest_of_call else []
            yield {"index": choice["index"], "call": call["index"], "arguments": arguments}
        yield from [{"index": choice["index"], key: value} for key, value in rest.items()]
        yield from [{"index": choice["index"], **ended}] if ended else []


def _event(block: str) -> Any:
    """An event's fields in order; a comment keeps its text."""
    fields = [line.partition(":")[::2] for line in block.splitlines()]
    return {name or "comment": _json(value.strip().encode()) for name, value in fields}


def _json(content: bytes) -> Any:
    text = content.decode("utf-8", "backslashreplace")
    try:
        return steady(json.loads(text))
    except ValueError:
        return steady(text)


def steady(value: Any) -> Any:
    """Without what no two runs share."""
    if isinstance(value, dict):
        if "cache_read_input_tokens" in value:  # Anthropic's count leaves out what the cache had
            whole = value["input_tokens"] + value["cache_read_input_tokens"] + value["cache_creation_input_tokens"]
            value = {**value, "input_tokens": whole}
        return {key: _masked(member) if key in VARIES else steady(member) for key, member in value.items()}
    if isinstance(value, list):
        return [steady(member) for member in value]
    if isinstance(value, str):
        value = value.replace(__version__, "<version>")
        return ID.sub(lambda match: f"<{match[1] or ''}id>", value)
    return round(value, 2) if isinstance(value, float) else value


def _masked(value: Any) -> Any:
    return value if value is None else f"<{type(value).__name__}>"


def merged(events: Sequence[Any]) -> list[Any]:
    """Events that continue the same text become one, with its text whole."""
    result: list[Any] = []
    for event in events:
        whole = _joined(result[-1], event) if result else None
        if whole is None:
            result.append(event)
        else:
            result[-1] = whole
    return result


def _joined(left: Any, right: Any, member: str = "") -> Any:
    """The two as one value; None where they differ in more than the text that they carry."""
    if isinstance(left, dict) and isinstance(right, dict) and list(left) == list(right):
        pairs = {key: _joined(left[key], right[key], key) for key in left}
        wrong = [key for key, value in pairs.items() if value is None and (left[key], right[key]) != (None, None)]
        return None if wrong else pairs
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        parts = [_joined(a, b, member) for a, b in zip(left, right, strict=True)]
        return None if any(part is None for part in parts) else parts
    if member in TEXT_MEMBERS and isinstance(left, str) and isinstance(right, str):
        return left + right
    return left if left == right and type(left) is type(right) else None


def request(name: str, path: str, body: Any = None, method: str = "POST", **headers: str) -> Exchange:
    sent = Request(path, body, method, {key.replace("_", "-"): value for key, value in headers.items()})
    return Exchange(name, lambda server: over_http1(server, sent), sent)


def get(name: str, path: str, **headers: str) -> Exchange:
    return request(name, path, None, "GET", **headers)


def without_framing(answer: Any) -> Any:
    """An answer over HTTP/1.1 as HTTP/2 has it: without the headers that frame a body or speak of the connection."""
    framing = ("transfer-encoding", "content-length", "connection", "keep-alive")
    headers = [header for header in answer["headers"] if header.partition(":")[0] not in framing]
    return {**answer, "headers": headers}
