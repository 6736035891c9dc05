"""Load reports for balancers: their forms, and what they are measured by."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.errors import QueueFullError
from penstock.gateway.metrics.request_metrics import EndedRequests
from penstock.gateway.metrics.server_load import EngineLoad, ServerLoad
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.load_report import LoadReport, LoadReporter, ReportForm

REPORT = LoadReport(
    application_utilization=0.5, rps_fractional=12.0, eps=0.25, named_metrics={"max_token_capacity": 1024}
)


def orca_load_report() -> Any:
    """The published message, as far as this server fills it in."""
    file = descriptor_pb2.FileDescriptorProto(name="orca.proto", package="xds.data.orca.v3", syntax="proto3")
    message = file.message_type.add(name="OrcaLoadReport")
    double = descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE
    numbers = {"cpu_utilization": 1, "mem_utilization": 2, "rps_fractional": 6, "eps": 7, "application_utilization": 9}
    for name, number in numbers.items():
        message.field.add(name=name, number=number, type=double, label=1)
    entry = message.nested_type.add(name="NamedMetricsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=descriptor_pb2.FieldDescriptorProto.TYPE_STRING, label=1)
    entry.field.add(name="value", number=2, type=double, label=1)
    entry_type = ".xds.data.orca.v3.OrcaLoadReport.NamedMetricsEntry"
    message.field.add(name="named_metrics", number=8, type=11, label=3, type_name=entry_type)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("xds.data.orca.v3.OrcaLoadReport"))


def test_the_three_forms() -> None:
    assert set(REPORT.text.split(", ")) == {
        "application_utilization=0.500000",
        "rps_fractional=12",
        "eps=0.250000",
        "named_metrics.max_token_capacity=1024",
    }
    expected = {
        "application_utilization": 0.5,
        "rps_fractional": 12.0,
        "eps": 0.25,
        "named_metrics": {"max_token_capacity": 1024},
    }
    assert json.loads(REPORT.json) == expected
    message = orca_load_report().FromString(REPORT.protobuf)
    found = {field.name: value for field, value in message.ListFields()}
    found["named_metrics"] = dict(found["named_metrics"])
    assert found == expected


@pytest.mark.parametrize("always", [None, *ReportForm])
def test_a_request_may_choose_the_form(always: ReportForm | None) -> None:
    reporter = LoadReporter(lambda: REPORT, always)
    assert reporter.http_headers(b" TEXT ") == [(b"endpoint-load-metrics", b"TEXT " + REPORT.text.encode())]
    assert reporter.http_headers(b"json") == [(b"endpoint-load-metrics", b"JSON " + REPORT.json.encode())]
    [(name, value)] = reporter.http_headers(b"bin")
    assert name == b"endpoint-load-metrics-bin"
    assert base64.b64decode(value + b"==") == REPORT.protobuf
    assert reporter.grpc_metadata(b"bin") == (("endpoint-load-metrics-bin", REPORT.protobuf),)
    assert reporter.grpc_metadata(b"text") == (("endpoint-load-metrics", f"TEXT {REPORT.text}"),)


@pytest.mark.parametrize("wanted", [None, b"", b"yaml", b"\xff"])
def test_without_a_known_form_the_option_decides(wanted: bytes | None) -> None:
    silent = LoadReporter(lambda: REPORT)
    assert silent.http_headers(wanted) == []
    assert silent.grpc_metadata(wanted) == ()
    telling = LoadReporter(lambda: REPORT, ReportForm.TEXT)
    assert telling.http_headers(wanted) == [(b"endpoint-load-metrics", b"TEXT " + REPORT.text.encode())]
    assert telling.grpc_metadata(wanted) == (("endpoint-load-metrics-bin", REPORT.protobuf),), (
        "as gRPC's balancers read"
    )


class Ends:
    """Requests that end at times of the test's choosing."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ended = EndedRequests(lambda: self.now)

    def end(self, count: int = 1, error: Exception | None = None, *, infers: bool = True) -> None:
        for _ in range(count):
            context = RequestContext(infers=infers)
            if error is not None:
                context.record.failed(error)
            self.ended(context)


def test_rates_are_those_of_the_last_seconds() -> None:
    ends = Ends()
    assert ends.ended.per_second() == (0.0, 0.0)
    for second in range(20):
        ends.now = 100.5 + second
        ends.end(4)
        ends.end(1, QueueFullError("full"))
        ends.end(9, infers=False)
    ends.now = 120.0
    ended, failed = ends.ended.per_second()
    assert (ended, failed) == (5.0, 1.0)
    ends.now = 200.0
    assert ends.ended.per_second() == (0.0, 0.0)


def test_a_young_server_s_rate_is_not_diluted() -> None:
    ends = Ends()
    ends.now = 102.0
    ends.end(10)
    assert ends.ended.per_second() == (5.0, 0.0)


@pytest.mark.parametrize(
    ("stats", "utilization"),
    [
        (EngineStats(num_blocks=100, num_free_blocks=100), 0.0),
        (EngineStats(num_running=2, num_blocks=100, num_free_blocks=90), 0.25),
        (EngineStats(num_running=2, num_blocks=100, num_free_blocks=20), 0.8),
        (EngineStats(num_running=8, num_waiting=4, num_blocks=100, num_free_blocks=50), 1.5),
        (EngineStats(), 0.0),
    ],
)
def test_utilization_is_that_of_what_is_scarce(stats: EngineStats, utilization: float) -> None:
    assert EngineLoad(stats, 16, 8).utilization == pytest.approx(utilization)


def test_the_busiest_model_counts_and_capacities_add_up() -> None:
    busy = EngineLoad(EngineStats(num_running=4, num_waiting=1, num_blocks=10, num_free_blocks=5), 16, 8)
    idle = EngineLoad(EngineStats(num_blocks=30, num_free_blocks=30), 32, 8)
    report = ServerLoad(lambda: [busy, idle], EndedRequests())()
    assert report.application_utilization == pytest.approx(5 / 8)
    assert report.named_metrics == {
        "kv_cache_utilization": pytest.approx(80 / 1120),
        "max_token_capacity": 1120.0,
        "num_requests_waiting": 1.0,
        "num_requests_running": 4.0,
    }
    without = ServerLoad(tuple, EndedRequests())()
    assert (without.application_utilization, without.named_metrics) == (0.0, {})
    assert 0 < without.mem_utilization < 1
