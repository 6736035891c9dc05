"""Routes of files and batches, of OpenAI's API and of Anthropic's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from penstock.engines.errors import UnsupportedError
from penstock.gateway.apis.anthropic.errors import ANTHROPIC
from penstock.gateway.apis.anthropic.models import QUERY as MESSAGE_QUERY
from penstock.gateway.apis.batches import files, message_batches, openai_batches
from penstock.gateway.apis.batches.files import FORM
from penstock.gateway.apis.batches.service import BatchService
from penstock.gateway.requests.access import INFER, OWN_FILES
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.pages import QUERY
from penstock.gateway.transports.http.routes import Handle, Route
from penstock.gateway.transports.http.settings import AppSettings

Answer = Callable[[BatchService, Exchange], Awaitable[None]]


async def _keeps_no_files(exchange: Exchange) -> None:
    raise UnsupportedError("This server keeps no files: it has neither --data-dir nor --data-memory.")


def file_routes(service: BatchService | None) -> list[Route]:
    """`service` None: the server keeps no files, as below."""

    def of(answer: Answer) -> Handle:
        return _keeps_no_files if service is None else partial(answer, service)

    create = _keeps_no_files if service is None else files.Uploads(service).create
    file, batch = "/v1/files/{file_id}", "/v1/batches/{batch_id}"
    request = openai_batches.CreateBatch
    return [
        Route("POST", "/v1/files", OWN_FILES, create, form=FORM),
        Route("GET", "/v1/files", OWN_FILES, of(files.list_files), query=(*QUERY, "purpose")),
        Route("GET", file, OWN_FILES, of(files.get_file)),
        Route("DELETE", file, OWN_FILES, of(files.delete_file)),
        Route("GET", f"{file}/content", OWN_FILES, of(files.file_content)),
        Route("POST", "/v1/batches", INFER, of(openai_batches.create_batch), schema=request),
        Route("GET", "/v1/batches", OWN_FILES, of(openai_batches.list_batches), query=QUERY),
        Route("GET", batch, OWN_FILES, of(openai_batches.get_batch)),
        Route("POST", f"{batch}/cancel", OWN_FILES, of(openai_batches.cancel_batch)),
    ]


def message_batch_routes(service: BatchService | None, settings: AppSettings) -> list[Route]:
    def of(answer: Answer) -> Handle:
        return _keeps_no_files if service is None else partial(answer, service)

    max_params = settings.max_body_bytes - message_batches.BESIDE_PARAMS
    create = partial(message_batches.create_batch, max_params)
    every, one = "/v1/messages/batches", "/v1/messages/batches/{batch_id}"
    rows: tuple[tuple[str, str, Answer], ...] = (
        ("GET", one, message_batches.get_batch),
        ("DELETE", one, message_batches.delete_batch),
        ("POST", f"{one}/cancel", message_batches.cancel_batch),
        ("GET", f"{one}/results", message_batches.batch_results),
    )
    return [
        Route("POST", every, INFER, of(create), ANTHROPIC, schema=message_batches.CreateMessageBatch),
        Route("GET", every, OWN_FILES, of(message_batches.list_batches), ANTHROPIC, query=MESSAGE_QUERY),
        *(Route(method, path, OWN_FILES, of(answer), ANTHROPIC) for method, path, answer in rows),
    ]
