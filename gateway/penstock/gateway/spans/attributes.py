"""What a request's span says of it: OpenTelemetry's semantic conventions for HTTP, RPC and generative AI."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.gateway.front.context import RequestContext
from penstock.gateway.front.record import METHODS, REQUEST_ON_STREAM, UNMATCHED, Outcome, RequestRecord

Attributes = dict[str, str | int | Sequence[str]]

FAULTS = frozenset({Outcome.SERVER_ERROR, Outcome.REFUSED, Outcome.DEADLINE})
"""Outcomes that are not the client's doing: the span's status is an error."""
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


def span_name(record: RequestRecord) -> str:
    """`POST /v1/completions`, or the RPC's full name. Never what the client sent."""
    if record.protocol == "grpc":
        return record.route.removeprefix("/")
    method = record.method if record.method in METHODS else "HTTP"
    return method if record.route == UNMATCHED else f"{method} {record.route}"


def span_attributes(context: RequestContext) -> Attributes:
    record = context.record
    attributes = _of_rpc(record) if record.protocol == "grpc" else _of_http(record)
    attributes["penstock.request.id"] = context.id
    attributes["penstock.outcome"] = record.outcome.value
    if context.tenant:
        attributes["penstock.tenant"] = context.tenant
    if record.model:
        attributes["penstock.model"] = record.model
    if record.reason:
        attributes["error.type"] = record.reason
    return attributes | _of_generation(record)


def _of_http(record: RequestRecord) -> Attributes:
    attributes: Attributes = {
        "http.request.method": record.method if record.method in METHODS else "_OTHER",
        "http.request.body.size": record.bytes_in,
    }
    if record.http_version:
        attributes["network.protocol.version"] = record.http_version
    if record.route != UNMATCHED:
        attributes["http.route"] = record.route
    if record.status:
        attributes["http.response.status_code"] = int(record.status)
    return attributes


def _of_rpc(record: RequestRecord) -> Attributes:
    method = record.route.removeprefix("/").removesuffix(REQUEST_ON_STREAM)
    attributes: Attributes = {"rpc.system.name": "grpc", "rpc.method": method}
    if record.status:
        attributes["rpc.response.status_code"] = record.status
    return attributes


def _of_generation(record: RequestRecord) -> Attributes:
    """Empty for requests that are not for a language model."""
    usage = record.usage
    operation = _OPERATIONS.get(record.route) or (usage and "text_completion")
    if not operation:
        return {}
    attributes: Attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "penstock"}
    if record.model:
        attributes["gen_ai.request.model"] = record.model
    if usage is not None:
        attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    if record.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = record.finish_reasons
    return attributes
