"""A collector that takes spans by OTLP over HTTP and keeps them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from support.server import wait_until


class Collector:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.paths: set[str] = set()
        self.resources: list[dict[str, Any]] = []
        self._spans: list[Any] = []

    def take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(values(of_resource.resource.attributes))
            self._spans += [span for of_scope in of_resource.scope_spans for span in of_scope.spans]

    def trace(self, trace_id: str, root: str) -> Trace:
        """The spans of a trace, once its span of this name is there: the server sends that one last."""
        wait_until(lambda: any(span.name == root for span in self.spans(trace_id)))
        return Trace(self.spans(trace_id))

    def spans(self, trace_id: str) -> list[Any]:
        """Those of a trace that have come so far."""
        return [span for span in list(self._spans) if span.trace_id.hex() == trace_id]


class Trace:
    def __init__(self, spans: list[Any]) -> None:
        self.spans = spans

    def one(self, name: str) -> Any:
        [span] = [span for span in self.spans if span.name == name]
        return span

    def children(self, of: str) -> list[str]:
        """Their names, by their beginnings."""
        parent = self.one(of).span_id
        found = [span for span in self.spans if span.parent_span_id == parent]
        return [span.name for span in sorted(found, key=lambda span: (span.start_time_unix_nano, span.name))]


def values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(server.server_port)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield collector
        server.shutdown()
        thread.join()
