"""From the record of a request to its spans."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from penstock.engines.errors import EngineError, InvalidRequestError
from penstock.gateway.configuration.config import Config, ConfigError, load_config
from penstock.gateway.metrics.spans import stage_spans
from penstock.gateway.models.language.generation import Usage
from penstock.gateway.requests.call import RequestJournal
from penstock.gateway.requests.context import Principal, RequestContext, read_context
from penstock.gateway.requests.record import RequestRecord, Stage
from penstock.gateway.server.composition.records import build_spans

TRACE, CALLER = "1" * 32, "2" * 16


def load(**flags: Any) -> Config:
    return load_config(flags, environ={})


def record(*stages: tuple[Stage, float], **fields: Any) -> RequestRecord:
    return RequestRecord(stages=list(stages), model="m", **fields)


CHAT = (
    (Stage.READING, 0.0),
    (Stage.TEMPLATE, 1.0),
    (Stage.TOKENIZE, 2.0),
    (Stage.TOKENIZE, 3.0),
    (Stage.ENGINE, 4.0),
    (Stage.DECODING, 7.0),
)


def test_stages_follow_each_other() -> None:
    assert stage_spans(record(*CHAT, queue_seconds=1.0, first_token_at=7.0), 9.0) == [
        ("receive", 0.0, 1.0, (), None),
        ("template", 1.0, 2.0, (), None),
        ("tokenize", 2.0, 4.0, (), None),
        ("queue", 4.0, 5.0, (), None),
        ("prefill", 5.0, 7.0, (), None),
        ("decode", 7.0, 9.0, (), None),
    ]


def test_nobody_knows_where_in_the_engine_a_request_without_an_output_was() -> None:
    assert stage_spans(record(*CHAT[:5]), 9.0)[-1] == ("engine", 4.0, 9.0, (), None)


def test_a_queue_is_no_longer_than_its_stage() -> None:
    assert stage_spans(record(*CHAT, queue_seconds=3.5, first_token_at=7.0), 9.0)[-3:-1] == [
        ("queue", 4.0, 7.0, (), None),
        ("prefill", 7.0, 7.0, (), None),
    ]


def test_a_classic_model_has_one_span() -> None:
    spans = stage_spans(record((Stage.READING, 0.0), (Stage.MODEL, 1.0)), 3.0)
    assert spans == [("receive", 0.0, 1.0, (), None), ("infer m", 1.0, 3.0, (), None)]


def test_what_a_model_asks_of_another_has_a_span() -> None:
    served = record((Stage.READING, 0.0), (Stage.MODEL, 1.0))
    context = RequestContext(record=served)
    context.called("inner", 1.5, 2.0)
    receive, outer = stage_spans(served, 3.0)
    assert receive.children == ()
    assert outer.children == (("infer inner", 1.5, 2.0, (), None),)


def test_the_steps_of_a_prompt_are_parts_of_its_prefill() -> None:
    served = record(*CHAT, queue_seconds=1.0, first_token_at=7.0)
    served.computed([(5.0, 6.0, 512), (5.5, 7.0, 8)])
    [prefill] = [span for span in stage_spans(served, 9.0) if span.name == "prefill"]
    assert prefill.children == (("prefill step", 5.0, 6.0, (), 512), ("prefill step", 5.5, 7.0, (), 8))
    served.computed((float(i), float(i), 1) for i in range(1000))
    assert len(served.prompt_chunks) == 128


def test_only_so_many_calls_are_noted_and_none_without_spans() -> None:
    served, untraced = record((Stage.READING, 0.0), (Stage.MODEL, 1.0)), RequestRecord()
    for _ in range(1000):
        served.called("inner", 1.5, 2.0)
    untraced.called("inner", 1.5, 2.0)
    assert (len(served.calls), untraced.calls) == (128, ())


def test_a_language_model_behind_kserve_has_its_own_stages() -> None:
    stages = (Stage.READING, 0.0), (Stage.MODEL, 1.0), (Stage.TOKENIZE, 2.0), (Stage.ENGINE, 3.0)
    assert [span.name for span in stage_spans(record(*stages), 5.0)] == ["receive", "tokenize", "engine"]
    assert stage_spans(record(*stages), 5.0)[0].end == 2.0


def test_what_was_only_read_has_no_stages() -> None:
    assert stage_spans(record((Stage.READING, 0.0)), 1.0) == []


def test_an_endpoint_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "penstock.gateway.metrics.spans", None)
    with pytest.raises(ConfigError, match=r"otlp-endpoint: .* pip install 'penstock-server\[otel\]'"):
        build_spans(load(otlp_endpoint="http://localhost:4318"))
    assert build_spans(load()) is None


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost", "http://", "http://a b", ""])
def test_an_endpoint_is_a_url(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        load(otlp_endpoint=endpoint)


class Traced:
    """A journal whose spans stay here."""

    def __init__(self, sample: float = 1.0) -> None:
        pytest.importorskip("opentelemetry.sdk", reason="needs the extra [otel]")
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        from penstock.gateway.metrics.spans import RequestSpans

        self._exporter = InMemorySpanExporter()
        spans = RequestSpans(SimpleSpanProcessor(self._exporter), Resource({}), sample)
        self.journal = RequestJournal([spans.end], [spans.begin])

    def begin(self, headers: dict[bytes, bytes] | None = None, **fields: Any) -> RequestContext:
        context = read_context(headers or {})
        self.journal.begin(context)
        for name, value in ({"method": "POST", "route": "/v1/chat/completions", "status": "200"} | fields).items():
            setattr(context.record, name, value)
        return context

    def spans(self, *contexts: RequestContext) -> list[Any]:
        for context in contexts:
            self.journal.end(context)
        return list(self._exporter.get_finished_spans())


def caller(flags: bytes = b"01") -> dict[bytes, bytes]:
    return {b"traceparent": f"00-{TRACE}-{CALLER}-".encode() + flags, b"tracestate": b"vendor=x"}


def test_a_request_belongs_to_its_caller_s_trace() -> None:
    traced = Traced(sample=0.0)
    context = traced.begin(caller())
    context.record.enter(Stage.TOKENIZE)
    receive, tokenize, request = traced.spans(context)
    assert (request.name, request.kind.name) == ("POST /v1/chat/completions", "SERVER")
    assert (f"{request.parent.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, CALLER)
    assert request.parent.is_remote
    assert {span.context.trace_id for span in (receive, tokenize, request)} == {int(TRACE, 16)}
    assert receive.parent == tokenize.parent == request.context
    assert len({span.context.span_id for span in (receive, tokenize, request)}) == 3
    assert request.context.trace_state == receive.context.trace_state == {"vendor": "x"}
    assert context.traceparent == f"00-{TRACE}-{request.context.span_id:016x}-01"


def test_times_are_those_of_the_day() -> None:
    traced = Traced()
    before = time.time_ns()
    context = traced.begin()
    context.record.enter(Stage.MODEL)
    receive, model, request = traced.spans(context)
    slack = 1_000_000  # two clocks
    assert before - slack <= request.start_time == receive.start_time
    assert receive.end_time == model.start_time
    assert model.end_time == request.end_time <= time.time_ns() + slack


def test_a_caller_without_spans_gets_none() -> None:
    traced = Traced()
    context = traced.begin(caller(b"00"))
    assert context.record.stages is None
    assert context.traceparent.endswith(f"{CALLER}-00")
    assert traced.spans(context) == []


def test_requests_are_sampled() -> None:
    nothing, half = Traced(sample=0.0), Traced(sample=0.5)
    context = nothing.begin()
    assert nothing.spans(context) == []
    assert context.traceparent.endswith("-00")
    assert 0 < len(half.spans(*(half.begin() for _ in range(100)))) < 100


def test_requests_on_a_stream_are_parts_of_it() -> None:
    traced = Traced()
    rpc = traced.begin(protocol="grpc", method="", route="/a.Service/Stream", status="OK")
    request = rpc.next_request()
    request.record.route += "/request"
    traced.journal.begin(request)
    part, whole = traced.spans(request, rpc)
    assert part.parent == whole.context
    assert (part.name, part.kind.name, whole.kind.name) == ("a.Service/Stream/request", "INTERNAL", "SERVER")
    assert part.attributes["rpc.method"] == whole.attributes["rpc.method"] == "a.Service/Stream"
    assert whole.attributes["rpc.response.status_code"] == "OK"


def test_requests_on_a_stream_that_is_not_sampled_are_not_either() -> None:
    traced = Traced(sample=0.0)
    request = traced.begin().next_request()
    assert request.traceparent.endswith("-00")


def test_what_a_span_says_of_a_generation() -> None:
    traced = Traced()
    context = traced.begin(
        model="m", usage=Usage(12, 34, 5), finish_reasons=("stop", "length"), bytes_in=70, first_token_at=1.0
    )
    context.principal = Principal(tenant="team")
    [span] = traced.spans(context)
    assert dict(span.attributes) == {
        "http.request.method": "POST",
        "http.request.body.size": 70,
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "penstock.request.id": context.id,
        "penstock.outcome": "ok",
        "penstock.tenant": "team",
        "penstock.model": "m",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 34,
        "gen_ai.usage.cache_read.input_tokens": 5,
        "gen_ai.response.finish_reasons": ("stop", "length"),
    }


def test_what_a_classic_model_did_is_no_generation() -> None:
    traced = Traced()
    [span] = traced.spans(traced.begin(route="/v2/models/{model}/infer", model="m"))
    assert not [name for name in span.attributes if name.startswith("gen_ai")]


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [(EngineError("x"), "engine_error", "ERROR"), (InvalidRequestError("x"), "invalid_request", "UNSET")],
)
def test_only_the_server_s_errors_are_a_span_s(error: Exception, kind: str, status: str) -> None:
    traced = Traced()
    context = traced.begin()
    context.record.failed(error)
    [span] = traced.spans(context)
    assert (span.attributes["error.type"], span.status.status_code.name) == (kind, status)


def test_a_span_s_name_is_never_the_client_s() -> None:
    traced = Traced()
    contexts = [traced.begin(method="GET", route="unmatched"), traced.begin(method="EVIL", route="unmatched")]
    assert [span.name for span in traced.spans(*contexts)] == ["GET", "HTTP"]


def test_probes_have_spans_only_when_they_fail() -> None:
    traced = Traced()
    failed = traced.begin(route="/health/ready", method="GET")
    failed.record.failed(EngineError("x"))
    assert [span.name for span in traced.spans(traced.begin(route="/metrics"), failed)] == ["GET /health/ready"]


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://host/otlp/v1/traces", "https://host/otlp/v1/traces"),
    ],
)
def test_where_traces_go(endpoint: str, url: str) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra [otel]")
    from penstock.gateway.metrics.spans import traces_url

    assert traces_url(endpoint) == url


def test_the_environment_says_whose_spans_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra [otel]")
    from penstock.gateway.metrics.spans import resource

    assert resource("gpu-3").attributes["service.name"] == "gpu-3"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=chat,deployment.environment.name=test")
    told = resource("gpu-3").attributes
    assert (told["service.name"], told["deployment.environment.name"]) == ("chat", "test")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
    assert resource("gpu-3").attributes["service.name"] == "front"
