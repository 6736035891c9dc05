"""Files: https://platform.openai.com/docs/api-reference/files."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from penstock.engines.errors import OverloadedError
from penstock.gateway.batches.service import BatchService
from penstock.gateway.batches.upload import content_length, read_upload
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.http.pages import page

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
