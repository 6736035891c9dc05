"""Spans on their way to a collector, by OTLP over HTTP."""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from penstock.engines import __version__
from penstock.gateway.spans.request_spans import RequestSpans


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
