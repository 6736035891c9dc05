"""Files, and their uploads: https://platform.openai.com/docs/api-reference/files."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from penstock.engines.errors import InvalidRequestError, OverloadedError, PayloadTooLargeError, UnsupportedError
from penstock.gateway.apis.batches.file_store import FOR_MODELS
from penstock.gateway.apis.batches.service import BatchService
from penstock.gateway.requests.call import ClientGone
from penstock.gateway.requests.intake import SMALL_BODY
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.pages import page

_ROOM_FOR_FIELDS = 64 << 10
_MAX_FIELDS = 8
_MAX_FILENAME = 255
_LIFETIMES = range(3600, 30 * 86400 + 1)
_PURPOSES = ("batch", *FOR_MODELS)
FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": [*_PURPOSES]},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": _LIFETIMES[0], "maximum": _LIFETIMES[-1]},
    },
}
"""As a JSON schema."""
_OTHER_PURPOSES = frozenset({"assistants", "evals", "fine-tune"})
"""OpenAI has uses for these."""


@dataclass(frozen=True, slots=True)
class Upload:
    filename: str
    purpose: str
    content: IO[bytes]
    lifetime: float | None
    """Seconds."""


def content_length(exchange: Exchange, max_file: int) -> int:
    """Bytes of the form; 0 when its client does not say. Raises PayloadTooLargeError, InvalidRequestError."""
    header = exchange.only_header(b"content-length")
    size = int(header) if header is not None and header.isdigit() else 0
    _check_size(size, max_file)
    return size


def _check_size(size: int, max_file: int) -> None:
    if size > max_file + _ROOM_FOR_FIELDS:
        raise _too_large(max_file)


def _too_large(max_file: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"A file may have at most {max_file} bytes.", param="file")


async def read_upload(exchange: Exchange, max_file: int, *, in_memory: bool) -> tuple[Upload, FormData]:
    """The form's files are open until it is closed; `in_memory`: they count as a request's body. Raises
    InvalidRequestError, UnsupportedError, PayloadTooLargeError, OverloadedError, ClientGone."""
    size = held = 0

    async def receive() -> Message:
        nonlocal size, held
        message = await exchange.receive()
        size += len(message.get("body", b""))
        exchange.context.record.bytes_in = size
        _check_size(size, max_file)
        if in_memory and size - held >= SMALL_BODY:
            exchange.hold_body(size - held)
            held = size
        return message

    request = Request(exchange.scope, receive)
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise InvalidRequestError("The body must be multipart/form-data, with the fields file and purpose.")
    parser = MultiPartParser(
        request.headers, request.stream(), max_files=1, max_fields=_MAX_FIELDS, max_part_size=_ROOM_FOR_FIELDS
    )
    if in_memory:
        parser.spool_max_size = 2 * (max_file + _ROOM_FOR_FIELDS)  # no part of it goes to a temporary folder
    try:
        form = await parser.parse()
    except (MultiPartException, ValueError):  # ValueError: of a charset that decodes nothing
        raise InvalidRequestError("The form cannot be read.") from None
    except ClientDisconnect:
        raise ClientGone from None
    try:
        return _upload(form, max_file), form
    except BaseException:
        await form.close()
        raise


def _upload(form: FormData, max_file: int) -> Upload:
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise InvalidRequestError("file is missing.", param="file")
    if (file.size or 0) > max_file:
        raise _too_large(max_file)
    if purpose in _OTHER_PURPOSES:
        raise UnsupportedError(f"purpose: this server has no use for files for '{purpose}'.", param="purpose")
    if purpose not in _PURPOSES:
        raise InvalidRequestError("purpose must be batch, user_data or vision.", param="purpose")
    filename = (file.filename or ("upload.jsonl" if purpose == "batch" else "upload"))[:_MAX_FILENAME]
    filename = filename.encode(errors="replace").decode()  # some charsets give halves of surrogate pairs
    return Upload(filename, purpose, file.file, _lifetime(form))


def _lifetime(form: FormData) -> float | None:
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequestError("expires_after.anchor must be created_at.", param="expires_after.anchor")
    text = seconds if isinstance(seconds, str) and len(seconds) <= len(str(_LIFETIMES[-1])) else ""
    return checked_lifetime(int(text) if text.isdecimal() else None, "expires_after")


def checked_lifetime(seconds: int | None, where: str) -> int:
    """Raises InvalidRequestError."""
    if seconds not in _LIFETIMES:
        message = f"{where}.seconds must be between {_LIFETIMES[0]} and {_LIFETIMES[-1]}."
        raise InvalidRequestError(message, param=f"{where}.seconds")
    assert seconds is not None
    return seconds


_PAGE, _MOST = 10_000, 10_000
_PIECE = 1 << 20
_MOST_UPLOADS = 16


class Uploads:
    """Files that are coming: they take room on the disk before they count."""

    def __init__(self, service: BatchService) -> None:
        self._service = service
        self._under_way = 0

    @contextmanager
    def _seat(self) -> Iterator[None]:
        """Raises OverloadedError."""
        if self._under_way >= _MOST_UPLOADS:
            raise OverloadedError(f"{_MOST_UPLOADS} files are being uploaded: try again later.", retry_after=5)
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    async def create(self, exchange: Exchange) -> None:
        service = self._service
        with exchange.call(), self._seat():
            size = content_length(exchange, service.max_file)
            await service.files.check_room(exchange.context.tenant, 1, size)
            upload, form = await read_upload(exchange, service.max_file, in_memory=service.volatile)
            service.tell_of_loss()
            try:
                stored = await service.files.add(
                    exchange.context.tenant, upload.filename, upload.purpose, upload.content, lifetime=upload.lifetime
                )
            finally:
                await form.close()
            await exchange.respond(200, msgspec.json.encode(stored.shown()))


async def list_files(service: BatchService, exchange: Exchange) -> None:
    query = exchange.query
    files = await service.files.of_tenant(exchange.context.tenant, query.get("purpose"))
    shown = page([file.shown() for file in files], query, default=_PAGE, most=_MOST)
    await exchange.respond(200, msgspec.json.encode(shown))


async def get_file(service: BatchService, exchange: Exchange) -> None:
    file = await service.files.find(exchange.context.tenant, exchange.names["file_id"])
    await exchange.respond(200, msgspec.json.encode(file.shown()))


async def delete_file(service: BatchService, exchange: Exchange) -> None:
    file_id = exchange.names["file_id"]
    await service.files.delete(exchange.context.tenant, file_id)
    await exchange.respond(200, msgspec.json.encode({"id": file_id, "object": "file", "deleted": True}))


async def file_content(service: BatchService, exchange: Exchange) -> None:
    stored = await service.files.find(exchange.context.tenant, exchange.names["file_id"])
    with exchange.call() as call:
        call.watch()
        with await asyncio.to_thread(service.files.contents.open, stored.id) as file:
            headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % stored.bytes)]
            await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
            left = stored.bytes
            while left > 0:
                piece = await asyncio.to_thread(file.read, min(left, _PIECE))
                left = left - len(piece) if piece else 0
                await exchange.raw_send({"type": "http.response.body", "body": piece, "more_body": left > 0})
            if not stored.bytes:
                await exchange.raw_send({"type": "http.response.body", "body": b"", "more_body": False})
