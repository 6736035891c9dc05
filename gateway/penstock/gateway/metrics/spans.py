"""OpenTelemetry spans of requests (extra `[otel]`): ids and the decision to sample at the beginning, the rest later.

Attributes follow the semantic conventions for HTTP, RPC and generative AI; spans leave by OTLP over HTTP."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from penstock.engines import __version__
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.record import (
    METHODS,
    QUIET_ROUTES,
    REQUEST_ON_STREAM,
    UNMATCHED,
    Outcome,
    RequestRecord,
    Stage,
)

_LAST_SECONDS = 3.0
"""For a collector to take what is left at the end of the server."""
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)


class _Open(NamedTuple):
    own: SpanContext
    parent: SpanContext | None


class RequestSpans:
    """Told of every request's beginning and end. Lives on the event loop.

    Spans are made in the form that exporters read. The SDK's Tracer takes eight times as long for a request with six
    stages, and the event loop would do nothing else meanwhile.
    """

    def __init__(self, processor: SpanProcessor, resource: Resource, sample: float = 1.0) -> None:
        """`sample` is the share of the requests that get spans, of those that come without a traceparent."""
        self._processor = processor
        self._new_span = partial(
            ReadableSpan, resource=resource, instrumentation_scope=InstrumentationScope("penstock", __version__)
        )
        self._ids = RandomIdGenerator()
        self._bound = TraceIdRatioBased(sample).bound
        self._open: dict[RequestContext, _Open] = {}

    def begin(self, context: RequestContext) -> None:
        """Decides whether the request gets spans: as its caller has decided, where that is known."""
        parent = None
        if context.traceparent:
            if not int(context.traceparent[-2:], 16) & TraceFlags.SAMPLED:
                return
            parent = _parent(context)
            trace_id, sampled = parent.trace_id, True
        else:
            trace_id = self._ids.generate_trace_id()
            sampled = trace_id & TraceIdRatioBased.TRACE_ID_LIMIT < self._bound
        span_id = self._ids.generate_span_id()
        context.traceparent = f"00-{trace_id:032x}-{span_id:016x}-{sampled:02x}"
        if sampled:
            own = SpanContext(trace_id, span_id, False, _SAMPLED) if parent is None else _child_of(parent, span_id)
            self._open[context] = _Open(own, parent)
            context.record.stages = [(Stage.READING, context.arrival)]

    def leave(self, context: RequestContext) -> None:
        """Another process makes the request's spans."""
        self._open.pop(context, None)

    def end(self, context: RequestContext) -> None:
        spans = self._open.pop(context, None)
        if spans is None or (context.record.route in QUIET_ROUTES and context.record.outcome is Outcome.OK):
            return
        ended = time.monotonic()
        epoch = time.time_ns() - _ns(ended)  # each time: the clock may be set while the server runs
        self._end_stages(stage_spans(context.record, ended), spans.own, epoch)
        self._processor.on_end(self._request_span(context, spans, epoch + _ns(context.arrival), epoch + _ns(ended)))

    def _end_stages(self, stages: Iterable[StageSpan], parent: SpanContext, epoch: int) -> None:
        """`epoch` is what the times count from, in nanoseconds since 1970."""
        for stage in stages:
            own = _child_of(parent, self._ids.generate_span_id())
            attributes = None if stage.num_tokens is None else {"penstock.tokens": stage.num_tokens}
            start, end = epoch + _ns(stage.start), epoch + _ns(stage.end)
            self._processor.on_end(
                self._new_span(stage.name, own, parent, attributes=attributes, start_time=start, end_time=end)
            )
            self._end_stages(stage.children, own, epoch)

    def _request_span(self, context: RequestContext, spans: _Open, start: int, end: int) -> ReadableSpan:
        record = context.record
        return self._new_span(
            span_name(record),
            spans.own,
            spans.parent,
            attributes=span_attributes(context),
            kind=SpanKind.INTERNAL if _is_part(record) else SpanKind.SERVER,
            status=_ERROR if record.outcome in FAULTS else _UNSET,
            start_time=start,
            end_time=end,
        )

    def close(self) -> None:
        """Gives the collector what is left, if it takes that soon."""
        ending = threading.Thread(target=self._processor.shutdown, daemon=True)
        ending.start()
        ending.join(_LAST_SECONDS)


def _parent(context: RequestContext) -> SpanContext:
    _, trace_id, span_id, flags = context.traceparent.split("-")
    state = TraceState.from_header([context.tracestate]) if context.tracestate else None
    remote = not _is_part(context.record)
    return SpanContext(int(trace_id, 16), int(span_id, 16), remote, TraceFlags(int(flags, 16)), state)


def _child_of(parent: SpanContext, span_id: int) -> SpanContext:
    return SpanContext(parent.trace_id, span_id, False, _SAMPLED, parent.trace_state)


def _is_part(record: RequestRecord) -> bool:
    """Of an RPC, which has a span of its own."""
    return record.route.endswith(REQUEST_ON_STREAM)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


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


_NAMES = {
    Stage.READING: "receive",
    Stage.TEMPLATE: "template",
    Stage.TOKENIZE: "tokenize",
    Stage.UPSTREAM: "upstream",
    Stage.DECODING: "decode",
}


class StageSpan(NamedTuple):
    """Times are of time.monotonic()."""

    name: str
    start: float
    end: float
    children: tuple[StageSpan, ...] = ()
    num_tokens: int | None = None
    """That a model computed in it."""


def stage_spans(record: RequestRecord, ended: float) -> list[StageSpan]:
    """Of a request that ended at `ended`. Empty where the request was only read."""
    entered = _merged(record.stages or [])
    if len(entered) < 2:
        return []
    ends = [start for _, start in entered[1:]] + [ended]
    spans: list[StageSpan] = []
    for (stage, start), end in zip(entered, ends, strict=True):
        if stage is Stage.ENGINE:
            spans += _in_engine(record, start, end)
        elif stage is Stage.MODEL:
            calls = tuple(StageSpan(f"infer {model}", began, done) for model, began, done in record.calls)
            spans.append(StageSpan(f"infer {record.model}", start, end, calls))
        else:
            spans.append(StageSpan(_NAMES[stage], start, end))
    return spans


def _merged(stages: list[tuple[Stage, float]]) -> list[tuple[Stage, float]]:
    """Without repetitions, and without the moment in which KServe hands a request to a model that is a language model
    and has stages of its own."""
    merged: list[tuple[Stage, float]] = []
    for number, (stage, start) in enumerate(stages, 1):
        passing = stage is Stage.MODEL and number < len(stages)
        if not passing and (not merged or merged[-1][0] is not stage):
            merged.append((stage, start))
    return merged


def _in_engine(record: RequestRecord, start: float, end: float) -> Iterator[StageSpan]:
    """The engine tells how long a request was queued together with its first output."""
    if record.first_token_at is None and not record.queue_seconds:
        yield StageSpan("engine", start, end)  # either or both: it ended before
        return
    computed = min(start + record.queue_seconds, end)
    if record.queue_seconds:
        yield StageSpan("queue", start, computed)
    yield StageSpan("prefill", computed, end, _chunks(record))


def _chunks(record: RequestRecord) -> tuple[StageSpan, ...]:
    """Steps overlap where two are under way at a time: one waits for the other on the device."""
    return tuple(StageSpan("prefill step", start, end, (), count) for start, end, count in record.prompt_chunks)


def open_spans(endpoint: str, sample: float, service: str) -> RequestSpans:
    """`service` is the server's name where OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES give none. Raises ValueError
    for OTEL_* variables that cannot be."""
    # at level warning it repeats what clients send in tracestate
    logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)
    exporter = OTLPSpanExporter(traces_url(endpoint))
    return RequestSpans(BatchSpanProcessor(exporter), resource(service), sample)


def traces_url(endpoint: str) -> str:
    """An endpoint without a path is a collector's, and traces have a fixed path below it."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


def resource(service: str) -> Resource:
    """What the spans say of this server: the environment's words win."""
    ours = Resource({SERVICE_NAME: service, SERVICE_VERSION: __version__})
    return Resource.create(dict(ours.merge(OTELResourceDetector().detect()).attributes))
