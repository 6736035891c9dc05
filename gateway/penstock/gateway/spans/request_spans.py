"""Spans of requests: ids and the decision to sample at the beginning, everything else at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from penstock.engines import __version__
from penstock.gateway.front.context import RequestContext
from penstock.gateway.front.record import QUIET_ROUTES, REQUEST_ON_STREAM, Outcome, RequestRecord, Stage
from penstock.gateway.spans.attributes import FAULTS, span_attributes, span_name
from penstock.gateway.spans.stages import StageSpan, stage_spans

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
