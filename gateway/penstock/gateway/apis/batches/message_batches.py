"""Batches of the Messages API: https://docs.anthropic.com/en/api/creating-message-batches. The requests of one are the
lines of a batch, and the results are made of its files."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import IO, Annotated, Any

import msgspec
from msgspec import Meta, Raw

from penstock.engines.errors import InvalidRequestError, NotFoundError, PayloadTooLargeError
from penstock.gateway.apis.batches.batch_store import MESSAGE_BATCH_PREFIX, StoredBatch
from penstock.gateway.apis.batches.file_store import MESSAGE_BATCH
from penstock.gateway.apis.batches.lines import MAX_LINES, LineError, check_body
from penstock.gateway.apis.batches.service import BatchService
from penstock.gateway.requests.bounded_json import check_json, decode_checked
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.pages import ids_between

ENDPOINT = "/v1/messages"
_WINDOW_S = 86400.0
_PAGE, _MOST = 20, 1000
_PIECE = 1 << 20
BESIDE_PARAMS = 256
"""Bytes of a line that are not its params, at most."""
_CUSTOM_ID = "^[a-zA-Z0-9_-]{1,64}$"
_NOTHING = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
_ENDS = {"batch_cancelled": "canceled", "batch_expired": "expired"}
"""Results of lines without an answer, by their codes."""


class _CustomId(str):
    """One that no other request of the batch has."""


class _Request(msgspec.Struct):
    custom_id: Annotated[_CustomId, Meta(extra_json_schema={"type": "string", "pattern": _CUSTOM_ID})]
    params: Raw


class CreateMessageBatch(msgspec.Struct):
    requests: list[_Request]


class _CustomIds:
    """Checks them while a body is decoded, so that the cost of one with too many requests is bounded."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def read(self, kind: type, custom_id: Any) -> _CustomId:
        """Raises InvalidRequestError."""
        where = f"requests.{len(self._seen)}.custom_id"
        if not isinstance(custom_id, str) or re.fullmatch(_CUSTOM_ID, custom_id) is None:
            message = f"{where} must have 1 to 64 letters, digits, '_' or '-'."
            raise InvalidRequestError(message, param=where)
        if custom_id in self._seen:
            raise InvalidRequestError(f"{where}: another request has the same.", param=where)
        if len(self._seen) == MAX_LINES:
            raise InvalidRequestError(f"requests: a batch may have at most {MAX_LINES}.", param="requests")
        self._seen.add(custom_id)
        return _CustomId(custom_id)


async def create_batch(max_params: int, service: BatchService, exchange: Exchange) -> None:
    """`max_params`: bytes that the params of a request may have."""
    with exchange.call():
        principal, files = exchange.context.principal, service.files
        await files.check_room(principal.tenant, 1, 0)
        body = await exchange.body(service.max_file)
        service.tell_of_loss()
        batch_id = f"{MESSAGE_BATCH_PREFIX}{uuid.uuid4().hex}"
        with files.contents.draft() as draft:
            total = await asyncio.to_thread(_write_lines, body, draft, max_params)
            file = await files.add(principal.tenant, f"{batch_id}_input.jsonl", MESSAGE_BATCH, draft)
        batch = StoredBatch(
            id=batch_id,
            tenant=principal.tenant,
            key=principal.key,
            models=principal.models,
            endpoint=ENDPOINT,
            input_file_id=file.id,
            window_s=_WINDOW_S,
            total=total,
            volatile=service.volatile,
        )
        try:
            await service.batches.add(batch)
        except BaseException:
            await files.forget([file.id])
            raise
        service.runner.begin(batch)
        await exchange.respond(200, msgspec.json.encode(_shown(batch)))


def _write_lines(body: bytes, out: IO[bytes], max_params: int) -> int:
    """Returns how many there are. `max_params`: bytes that the params of one may have. What is wrong with them is its
    result, if they can be a line at all. Raises InvalidRequestError."""
    requests = decode_checked(body, CreateMessageBatch, read=_CustomIds().read).requests
    if not requests:
        raise InvalidRequestError("requests must not be empty.", param="requests")
    for number, request in enumerate(requests):
        where = f"requests.{number}.params"
        if memoryview(request.params).nbytes > max_params:
            raise PayloadTooLargeError(f"{where}: a request may have at most {max_params} bytes.", param=where)
        try:
            check_json(bytes(request.params), field=where)
            check_body(request.params)
        except LineError as error:
            message = str(error).replace("body must", f"{where} must")
            raise InvalidRequestError(message, param=where) from None
        line = {"custom_id": str(request.custom_id), "url": ENDPOINT, "body": request.params}
        out.write(msgspec.json.encode(line).replace(b"\n", b" ") + b"\n")
    return len(requests)


async def list_batches(service: BatchService, exchange: Exchange) -> None:
    tenant, query = exchange.context.tenant, exchange.query
    ids = await service.batches.ids(tenant, MESSAGE_BATCH_PREFIX)
    some, has_more = ids_between(ids[::-1], query, default=_PAGE, most=_MOST)
    kept = await service.batches.find_all(tenant, some)
    ends = {"first_id": some[0], "last_id": some[-1]} if some else {"first_id": None, "last_id": None}
    data = [_shown(service.runner.find(batch.id) or batch) for batch in kept]
    await exchange.respond(200, msgspec.json.encode({"data": data, "has_more": has_more, **ends}))


async def get_batch(service: BatchService, exchange: Exchange) -> None:
    await exchange.respond(200, msgspec.json.encode(_shown(await _find(service, exchange))))


async def cancel_batch(service: BatchService, exchange: Exchange) -> None:
    batch = await _find(service, exchange)
    if not batch.is_open:
        raise InvalidRequestError("A batch that has ended cannot be canceled.", param="message_batch_id")
    if batch.status in ("validating", "in_progress"):  # else it ends anyway
        await service.runner.cancel(batch)
    await exchange.respond(200, msgspec.json.encode(_shown(batch)))


async def delete_batch(service: BatchService, exchange: Exchange) -> None:
    batch = await _find(service, exchange)
    if batch.is_open:
        raise InvalidRequestError("A batch that has not ended cannot be deleted.", param="message_batch_id")
    await service.batches.delete(batch.id)
    files = (batch.input_file_id, batch.output_file_id, batch.error_file_id)
    await service.files.forget([file_id for file_id in files if file_id is not None])
    deleted = {"id": batch.id, "type": "message_batch_deleted"}
    await exchange.respond(200, msgspec.json.encode(deleted))


async def batch_results(service: BatchService, exchange: Exchange) -> None:
    batch = await _find(service, exchange)
    if batch.is_open:
        raise NotFoundError("This batch has no results yet: it has not ended.", param="message_batch_id")
    with exchange.call() as call, ExitStack() as opened:
        call.watch()
        files = [opened.enter_context(await _opened(service, file_id)) for file_id in _result_files(batch)]
        headers = [(b"content-type", b"application/x-jsonl")]
        await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
        async for piece in _pieces(batch, files):
            await exchange.raw_send({"type": "http.response.body", "body": piece, "more_body": True})
        await exchange.raw_send({"type": "http.response.body", "body": b"", "more_body": False})


async def _find(service: BatchService, exchange: Exchange) -> StoredBatch:
    batch_id = exchange.names["batch_id"]
    batch = await service.batches.find(exchange.context.tenant, batch_id, MESSAGE_BATCH_PREFIX)
    return service.runner.find(batch.id) or batch


def _result_files(batch: StoredBatch) -> Sequence[str]:
    """One that the server could not go on with has its requests alone."""
    files = (batch.input_file_id,) if batch.status == "failed" else (batch.output_file_id, batch.error_file_id)
    return [file_id for file_id in files if file_id is not None]


async def _opened(service: BatchService, file_id: str) -> IO[bytes]:
    """Raises NotFoundError."""
    try:
        return await asyncio.to_thread(service.files.contents.open, file_id)
    except NotFoundError:
        message = "The results of this batch are no longer kept (--data-retention)."
        raise NotFoundError(message, param="message_batch_id") from None


async def _pieces(batch: StoredBatch, files: Sequence[IO[bytes]]) -> AsyncIterator[bytes]:
    failure = _failure(batch.errors[0]["message"]) if batch.status == "failed" and batch.errors else None

    def read(file: IO[bytes]) -> bytes:
        return b"".join([_individual(line, failure) for line in file.readlines(_PIECE)])

    for file in files:
        while piece := await asyncio.to_thread(read, file):
            yield piece


class _Response(msgspec.Struct):
    status_code: int
    body: Raw
    warnings: list[dict[str, str]] | None = None


class _Error(msgspec.Struct):
    code: str
    message: str


class _Result(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Result).decode


def _individual(line: bytes, failure: Mapping[str, Any] | None) -> bytes:
    """A line of the results. `failure`: the result of every line."""
    outcome = _decode(line)
    shown = {"custom_id": outcome.custom_id, "result": failure or _result(outcome)}
    return msgspec.json.encode(shown) + b"\n"


def _result(outcome: _Result) -> Mapping[str, Any]:
    response, error = outcome.response, outcome.error
    if response is None:
        if error is not None and error.code in _ENDS:
            return {"type": _ENDS[error.code]}
        return _failure("There is no result." if error is None else error.message)
    warnings = {"warnings": response.warnings} if response.warnings else {}
    if response.status_code == 200:
        return {"type": "succeeded", "message": response.body, **warnings}
    return {"type": "errored", "error": response.body, **warnings}


def _failure(message: str) -> Mapping[str, Any]:
    return {"type": "errored", "error": {"type": "error", "error": {"type": "api_error", "message": message}}}


def _shown(batch: StoredBatch) -> dict[str, Any]:
    canceling = batch.moments.get("cancelling")
    status = "canceling" if batch.status == "cancelling" else "in_progress" if batch.is_open else "ended"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": _counts(batch),
        "created_at": _moment(batch.created),
        "expires_at": _moment(batch.expires),
        "ended_at": None if batch.is_open else _moment(batch.last_change),
        "cancel_initiated_at": None if canceling is None else _moment(canceling),
        "archived_at": None,
        "results_url": None if batch.is_open else f"/v1/messages/batches/{batch.id}/results",
        **({"volatile": True} if batch.volatile else {}),
    }


def _counts(batch: StoredBatch) -> Mapping[str, int]:
    """As Anthropic's: all are processing until the whole batch has ended."""
    if batch.is_open:
        return {**_NOTHING, "processing": batch.total}
    if batch.status == "failed":
        return {**_NOTHING, "errored": batch.total}
    unanswered = batch.unanswered or 0
    end = "canceled" if batch.status == "cancelled" else "expired"
    counts = {"succeeded": batch.completed, "errored": batch.failed - unanswered, end: unanswered}
    return {**_NOTHING, **counts}


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
