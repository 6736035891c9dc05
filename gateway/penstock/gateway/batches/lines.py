"""The lines of a batch's input, as at https://platform.openai.com/docs/api-reference/batch/request-input, and of its
output."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.front.bounded_json import BYTE_ORDER_MARK, check_json

MAX_LINES = 50_000
_MAX_LINES_OF_FILE = 2 * MAX_LINES
"""Empty ones included: a file can hold hundreds of millions, and a thread that reads them leaves the event loop little
time."""
MAX_CUSTOM_ID = 512
_MAX_ERRORS = 100
_encode = msgspec.json.Encoder().encode


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Streams(msgspec.Struct):
    stream: bool | None = None


@dataclass(frozen=True, slots=True)
class Line:
    number: int
    """From 1; empty lines count."""
    custom_id: str
    url: str
    """The endpoint's path."""
    body: bytes
    """Of the request, JSON."""


class LineError(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def parse_line(number: int, text: bytes, endpoints: Collection[str]) -> Line:
    """Raises LineError."""
    if number == 1:
        text = text.removeprefix(BYTE_ORDER_MARK)
    try:
        check_json(text)
        line = msgspec.json.decode(text, type=_Line)
    except msgspec.ValidationError as error:
        raise LineError("invalid_request", f"This line is not a request: {error}.") from None
    except (msgspec.DecodeError, InvalidRequestError, UnicodeDecodeError):
        raise LineError("invalid_json_line", "This line is not valid JSON.") from None
    if not line.custom_id or len(line.custom_id) > MAX_CUSTOM_ID:
        raise LineError("invalid_custom_id", f"custom_id must have 1 to {MAX_CUSTOM_ID} characters.", "custom_id")
    if line.method != "POST":
        raise LineError("invalid_method", "method must be POST.", "method")
    if line.url not in endpoints:
        raise LineError("mismatched_endpoint", f"url must be {' or '.join(endpoints)}.", "url")
    try:
        streams = msgspec.json.decode(line.body, type=_Streams).stream
    except msgspec.ValidationError:
        raise LineError("invalid_request", "body must be an object.", "body") from None
    if streams:
        raise LineError("invalid_request", "Lines of a batch cannot be streamed.", "body.stream")
    return Line(number, line.custom_id, line.url, bytes(line.body))


def read_lines(path: Path, endpoints: Collection[str]) -> Iterator[Line]:
    """Those that are right, in order."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                try:
                    yield parse_line(number, text, endpoints)
                except LineError:
                    continue


def check_lines(path: Path, endpoints: Collection[str], max_line: int) -> tuple[int, list[dict[str, Any]]]:
    """How many lines there are, and what is wrong with the file: at most a hundred errors, as batches show them.
    `max_line`: bytes that a line may have."""
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    with path.open("rb") as file:
        number = 0
        while text := file.readline(max_line + 1):
            number += 1
            if not text.strip() and number <= _MAX_LINES_OF_FILE:
                continue
            try:
                if number > _MAX_LINES_OF_FILE:
                    raise LineError("too_many_tasks", f"A file may have at most {_MAX_LINES_OF_FILE} lines.")
                if len(text) > max_line:
                    raise LineError("line_too_long", f"A line may have at most {max_line} bytes.")
                line = parse_line(number, text, endpoints)
                if line.custom_id in seen:
                    raise LineError("duplicate_custom_id", "Another line has the same custom_id.", "custom_id")
                seen.add(line.custom_id)
                if len(seen) > MAX_LINES:
                    raise LineError("too_many_tasks", f"A batch may have at most {MAX_LINES} lines.")
            except LineError as error:
                errors.append({"code": error.code, "line": number, "message": str(error), "param": error.param})
                if len(errors) == _MAX_ERRORS or error.code in ("line_too_long", "too_many_tasks"):
                    break
    if not seen and not errors:
        errors.append({"code": "empty_file", "line": None, "message": "The file has no requests.", "param": None})
    return len(seen), errors


def answered(
    line: Line, status: int, request_id: str, body: bytes, warnings: Sequence[Mapping[str, str]] = ()
) -> bytes:
    """The result of a line that was answered, with an error's status, too. `warnings`: of its record."""
    response: dict[str, object] = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    if warnings:
        response["warnings"] = warnings
    return _result(line, response, None)


def unanswered(line: Line, code: str, message: str) -> bytes:
    """The result of a line whose time was over."""
    return _result(line, None, {"code": code, "message": message})


def _result(line: Line, response: object, error: object) -> bytes:
    result = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": error}
    return _encode(result)
