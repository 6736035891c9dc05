"""The lines of a batch's input, as at https://platform.openai.com/docs/api-reference/batch/request-input, and of its
output."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from penstock.engines.errors import EngineDeadError, InvalidRequestError
from penstock.gateway.apis.anthropic.errors import ANTHROPIC_ERRORS
from penstock.gateway.requests.bounded_json import BYTE_ORDER_MARK, check_json
from penstock.gateway.requests.call import Detached
from penstock.gateway.requests.context import Principal
from penstock.gateway.transports.http.error_form import OPENAI_ERRORS, ErrorForm
from penstock.gateway.transports.http.inner_request import InnerAnswer, InnerRequest
from penstock.gateway.transports.http.routes import Handle
from penstock.gateway.transports.http.settings import AppSettings

MAX_LINES = 50_000
_MAX_LINES_OF_FILE = 2 * MAX_LINES
"""Empty ones included: a file can hold hundreds of millions, and a thread that reads them leaves the event loop little
time."""
MAX_CUSTOM_ID = 512
_MAX_ERRORS = 100
_REST = 1 << 20
_RESULT_BESIDE_ID = 320
"""Bytes of the result of a line that was not answered, beside its custom_id."""
_encode = msgspec.json.Encoder().encode


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Streams(msgspec.Struct):
    stream: bool | None = None


@dataclass(frozen=True, slots=True)
class BatchLine:
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


@dataclass(frozen=True, slots=True)
class WrongLine:
    number: int
    custom_id: str | None
    """None where it cannot be read."""
    error: LineError

    def shown(self) -> dict[str, Any]:
        """As batches show what is wrong with their input."""
        error = self.error
        return {"code": error.code, "line": self.number, "message": str(error), "param": error.param}


class _Named(msgspec.Struct):
    custom_id: str


def parse_line(number: int, text: bytes, endpoints: Collection[str]) -> BatchLine:
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
    check_body(line.body)
    return BatchLine(number, line.custom_id, line.url, bytes(line.body))


def check_body(body: msgspec.Raw) -> None:
    """Whether a request may stand in a batch. Raises LineError."""
    try:
        streams = msgspec.json.decode(body, type=_Streams).stream
    except msgspec.ValidationError:
        raise LineError("invalid_request", "body must be an object.", "body") from None
    if streams:
        raise LineError("invalid_request", "Lines of a batch cannot be streamed.", "body.stream")


def read_lines(open_file: Callable[[], IO[bytes]], endpoints: Collection[str]) -> Iterator[BatchLine]:
    """Those of a file that was checked, in order. It holds no more than a line: many files are read at one time."""
    with open_file() as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                try:
                    yield parse_line(number, text, endpoints)
                except LineError:
                    continue


def read_all(
    open_file: Callable[[], IO[bytes]], endpoints: Collection[str], max_line: int
) -> Iterator[BatchLine | WrongLine]:
    """All lines that are not empty, in order; `max_line`: bytes that one may have. What comes behind one that is wrong
    with `too_many_tasks` is not read."""
    seen: set[str] = set()
    with open_file() as file:
        number = 0
        while text := file.readline(max_line + 1):
            number += 1
            if not text.strip() and number <= _MAX_LINES_OF_FILE:
                continue
            try:
                yield _checked(number, text, endpoints, max_line, seen)
            except LineError as error:
                yield WrongLine(number, _custom_id(text, error), error)
                if error.code == "too_many_tasks":
                    return
            _skip_rest(file, text)


def _checked(number: int, text: bytes, endpoints: Collection[str], max_line: int, seen: set[str]) -> BatchLine:
    """Raises LineError."""
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
    return line


def _custom_id(text: bytes, error: LineError) -> str | None:
    """Of a line that is wrong."""
    if error.code in ("line_too_long", "invalid_json_line"):
        return None
    try:
        return msgspec.json.decode(text, type=_Named).custom_id[:MAX_CUSTOM_ID]
    except msgspec.DecodeError:
        return None


def _skip_rest(file: IO[bytes], text: bytes) -> None:
    """Of a line whose beginning this is."""
    while text and not text.endswith(b"\n"):
        text = file.readline(_REST)


@dataclass(frozen=True, slots=True)
class InputCheck:
    total: int
    """Lines that are right."""
    errors: list[dict[str, Any]]
    """What is wrong with the file: at most a hundred errors, as batches show them."""
    result_bytes: int
    """That the results of all lines take at least."""


def check_lines(open_file: Callable[[], IO[bytes]], endpoints: Collection[str], max_line: int) -> InputCheck:
    total = result_bytes = 0
    errors: list[dict[str, Any]] = []
    for line in read_all(open_file, endpoints, max_line):
        if isinstance(line, BatchLine):
            total += 1
            result_bytes += least_result(line)
        else:
            errors.append(line.shown())
            if len(errors) == _MAX_ERRORS:
                break
    if not total and not errors:
        errors.append({"code": "empty_file", "line": None, "message": "The file has no requests.", "param": None})
    return InputCheck(total, errors, result_bytes)


def least_result(line: BatchLine) -> int:
    """Bytes that there is room for before the line is asked: enough for every result of `unanswered`."""
    return len(_encode(line.custom_id)) + _RESULT_BESIDE_ID


def answered(
    line: BatchLine, status: int, request_id: str, body: bytes, warnings: Sequence[Mapping[str, str]] = ()
) -> bytes:
    """The result of a line that was answered, with an error's status, too. `warnings`: of its record."""
    response: dict[str, object] = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    if warnings:
        response["warnings"] = warnings
    return _result(line, response, None)


def unanswered(line: BatchLine, code: str, message: str) -> bytes:
    """The result of a line without an answer."""
    return _result(line, None, {"code": code, "message": message})


def refused(line: WrongLine) -> bytes:
    """The result of a line that is wrong, where it costs no other line."""
    return _result(line, None, line.shown())


def _result(line: BatchLine | WrongLine, response: object, error: object) -> bytes:
    result = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": error}
    return _encode(result)


_BUSY = frozenset({429, 503, 529})
"""With these a line is asked again: the server, or the model, has no room for it now. 529 is Anthropic's."""
_ERROR_FORMS: Mapping[str, ErrorForm] = {"/v1/messages": ANTHROPIC_ERRORS}
"""Where it is not OpenAI's."""
_AGAIN_AFTER_S = 1.0
_ERRORS_FROM = 400
_MOST_DEATHS = 3
"""Of engines, each while it worked on the line: then the line fails, since it may be what kills them."""


async def _nobody_counts() -> None:
    """Where deaths are forgotten at the end of the process."""


class LineSeat:
    """A line's place among those that are with the models at one time."""

    def __init__(self, seats: asyncio.Semaphore) -> None:
        self._seats = seats
        self._taken = False

    async def take(self) -> None:
        """Idempotent."""
        if not self._taken:
            await self._seats.acquire()
            self._taken = True

    def leave(self) -> None:
        """Idempotent."""
        if self._taken:
            self._taken = False
            self._seats.release()


class LineAsker:
    """Asks lines until they have an answer. When an engine dies, one of the lines that it worked on may be the cause.
    So these are asked one at a time: the next death then harms no other line."""

    def __init__(self, endpoints: Mapping[str, Handle], settings: AppSettings, lines_in_flight: int) -> None:
        self._endpoints = endpoints
        self._settings = settings
        self._seats = asyncio.Semaphore(lines_in_flight)
        self._suspects = asyncio.Lock()

    def seat(self) -> LineSeat:
        """One that is not taken yet."""
        return LineSeat(self._seats)

    async def answer(
        self,
        line: BatchLine,
        principal: Principal,
        seat: LineSeat,
        num_deaths: int = 0,
        died: Callable[[], Awaitable[None]] = _nobody_counts,
    ) -> tuple[bytes, bool]:
        """The line's result, and whether it is an error. While there is no room for the line, it waits without the
        seat, so that lines for other models go on. `num_deaths`: of engines that had it before; `died` is told of each
        one more."""
        while True:
            answer = await self._ask(line, principal, seat, suspected=num_deaths > 0)
            if answer.status not in _BUSY:
                break
            if answer.reason == EngineDeadError.code:
                num_deaths += 1
                await died()
                if num_deaths >= _MOST_DEATHS:
                    break
            seat.leave()
            await asyncio.sleep(_AGAIN_AFTER_S)
        result = answered(line, answer.status, answer.request_id, answer.body, answer.warnings)
        return result, answer.status >= _ERRORS_FROM

    async def _ask(self, line: BatchLine, principal: Principal, seat: LineSeat, *, suspected: bool) -> InnerAnswer:
        if not suspected:
            return await self._ask_from(seat, line, principal)
        seat.leave()
        async with self._suspects:
            return await self._ask_from(seat, line, principal)

    async def _ask_from(self, seat: LineSeat, line: BatchLine, principal: Principal) -> InnerAnswer:
        await seat.take()
        form = _ERROR_FORMS.get(line.url, OPENAI_ERRORS)
        drain, journal = self._settings.drain, self._settings.journal
        request = InnerRequest(self._endpoints[line.url], line.url, line.body, principal, drain, form)
        await Detached(request.context, journal, request.run).run()
        return request.answer
