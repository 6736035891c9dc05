"""Batches of OpenAI's API: https://platform.openai.com/docs/api-reference/batch."""

from __future__ import annotations

import re
import uuid

import msgspec

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.batches.batch_store import BATCH_PREFIX, StoredBatch
from penstock.gateway.apis.batches.files import checked_lifetime
from penstock.gateway.apis.batches.service import BatchService
from penstock.gateway.apis.openai.validation import check_metadata
from penstock.gateway.generating.request_reading import parse
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.pages import page

_PAGE, _MOST = 20, 100
_WINDOW = re.compile(r"([1-9][0-9]{0,2})([hd])")
_MAX_WINDOW_S = 30 * 86400.0
_MAX_BODY = 64 << 10


class _ExpiresAfter(msgspec.Struct):
    anchor: str
    seconds: int


class CreateBatch(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: _ExpiresAfter | None = None


async def create_batch(service: BatchService, exchange: Exchange) -> None:
    request = parse(await exchange.body(_MAX_BODY), CreateBatch, {})
    principal = exchange.context.principal
    check_metadata(request.metadata)
    if request.endpoint not in service.endpoints:
        raise InvalidRequestError(f"endpoint must be one of {', '.join(service.endpoints)}.", param="endpoint")
    window_s, lifetime = _window(request.completion_window), None
    if request.output_expires_after is not None:
        if request.output_expires_after.anchor != "created_at":
            param = "output_expires_after.anchor"
            raise InvalidRequestError(f"{param} must be created_at.", param=param)
        lifetime = checked_lifetime(request.output_expires_after.seconds, "output_expires_after")
    await service.files.check_room(principal.tenant, 0, 0)
    file = await service.files.find(principal.tenant, request.input_file_id, "input_file_id")
    if file.purpose != "batch":
        raise InvalidRequestError("input_file_id: the file's purpose must be batch.", param="input_file_id")
    batch = StoredBatch(
        id=f"{BATCH_PREFIX}{uuid.uuid4().hex}",
        tenant=principal.tenant,
        key=principal.key,
        models=principal.models,
        endpoint=request.endpoint,
        input_file_id=file.id,
        window_s=window_s,
        metadata=request.metadata,
        output_lifetime=lifetime,
        volatile=service.volatile,
    )
    await service.batches.add(batch)
    service.runner.begin(batch)
    await exchange.respond(200, msgspec.json.encode(batch.shown()))


async def list_batches(service: BatchService, exchange: Exchange) -> None:
    tenant, query = exchange.context.tenant, exchange.query
    ids = [{"id": entry} for entry in await service.batches.ids(tenant, BATCH_PREFIX)]
    listing = page(ids, query, default=_PAGE, most=_MOST)
    kept = await service.batches.find_all(tenant, [entry["id"] for entry in listing["data"]])
    shown = [(service.runner.find(batch.id) or batch).shown() for batch in kept]
    await exchange.respond(200, msgspec.json.encode(listing | {"data": shown}))


async def get_batch(service: BatchService, exchange: Exchange) -> None:
    await exchange.respond(200, msgspec.json.encode((await _find(service, exchange)).shown()))


async def cancel_batch(service: BatchService, exchange: Exchange) -> None:
    batch = await _find(service, exchange)
    if batch.status not in ("validating", "in_progress", "cancelling"):
        raise InvalidRequestError(f"A batch that is {batch.status} cannot be cancelled.", param="batch_id")
    if batch.status != "cancelling":
        await service.runner.cancel(batch)
    await exchange.respond(200, msgspec.json.encode(batch.shown()))


async def _find(service: BatchService, exchange: Exchange) -> StoredBatch:
    batch = await service.batches.find(exchange.context.tenant, exchange.names["batch_id"], BATCH_PREFIX)
    return service.runner.find(batch.id) or batch


def _window(text: str) -> float:
    """Seconds of "24h" or "7d". Raises InvalidRequestError."""
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * (3600.0 if match[2] == "h" else 86400.0) if match else 0.0
    if not 0 < seconds <= _MAX_WINDOW_S:
        message = "completion_window must be a number of hours or days, as 24h or 7d, up to 30d."
        raise InvalidRequestError(message, param="completion_window")
    return seconds
