"""Reports of this server's load, sent to load balancers with an answer: Open Request Cost Aggregation (ORCA).

The report: https://github.com/cncf/xds/blob/main/xds/data/orca/v3/orca_load_report.proto. A balancer that wants one
names a form in the request header `endpoint-load-metrics-format`: TEXT and JSON come back in `endpoint-load-metrics`,
BIN, the report as protobuf, in `endpoint-load-metrics-bin`, as gRPC's own balancers read it.
"""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cached_property

import msgspec

FORMAT_HEADER = b"endpoint-load-metrics-format"
_HEADER = "endpoint-load-metrics"
_BINARY_HEADER = "endpoint-load-metrics-bin"
_GOOD_FOR = 0.1
"""Seconds for which a report is told again: an answer should not cost a look at every model."""

_NUMBERS = {
    "cpu_utilization": 1,
    "mem_utilization": 2,
    "rps_fractional": 6,
    "eps": 7,
    "application_utilization": 9,
}
"""Fields of the report that are numbers, by their place in the protobuf."""
_NAMED_METRICS = 8
_FIXED64, _BYTES = 1, 2
"""Wire types."""


class ReportForm(StrEnum):
    TEXT = "text"
    JSON = "json"
    BIN = "bin"


class LoadReport(msgspec.Struct, frozen=True, dict=True, omit_defaults=True, kw_only=True):
    """A number that is 0 may be left out, as protobuf does; to a balancer both are the same."""

    application_utilization: float = 0.0
    """How much of what the server can do at a time it does: 1 is full, more means that requests wait."""
    cpu_utilization: float = 0.0
    """Of the machine, 0 to 1."""
    mem_utilization: float = 0.0
    rps_fractional: float = 0.0
    """Requests that end in a second."""
    eps: float = 0.0
    """Those of them that fail through the server's fault."""
    named_metrics: Mapping[str, float] = {}

    @cached_property
    def text(self) -> str:
        """`NAME=VALUE, ...`, with 6 decimals."""
        values = {name: getattr(self, name) for name in _NUMBERS}
        shown = {name: value for name, value in values.items() if value}
        shown |= {f"named_metrics.{name}": value for name, value in self.named_metrics.items()}
        return ", ".join(f"{name}={value:.6f}".removesuffix(".000000") for name, value in shown.items())

    @cached_property
    def json(self) -> str:
        return msgspec.json.encode(self).decode()

    @cached_property
    def protobuf(self) -> bytes:
        data = b""
        for name, number in _NUMBERS.items():
            value = getattr(self, name)
            if value:
                data += _double(number, value)
        for name, value in self.named_metrics.items():
            entry = _text(1, name.encode()) + _double(2, value)
            data += _text(_NAMED_METRICS, entry)
        return data

    def in_form(self, form: ReportForm) -> tuple[str, str | bytes]:
        """(header, value); the value of a binary header is bytes."""
        if form is ReportForm.BIN:
            return _BINARY_HEADER, self.protobuf
        return _HEADER, f"TEXT {self.text}" if form is ReportForm.TEXT else f"JSON {self.json}"


class LoadReporter:
    """Gives the reports that requests ask for, and where `always` names a form, one with every answer."""

    def __init__(self, measure: Callable[[], LoadReport], always: ReportForm | None = None) -> None:
        self._measure = measure
        self._always = always
        self._newest = LoadReport()
        self._until = 0.0

    def report(self) -> LoadReport:
        now = time.monotonic()
        if now >= self._until:
            self._newest = self._measure()
            self._until = now + _GOOD_FOR
        return self._newest

    def http_headers(self, header: bytes | None) -> list[tuple[bytes, bytes]]:
        """`header`: the value of FORMAT_HEADER. Empty where no report is asked for, or one in a form that is not known:
        it is a balancer that asks, and no request of its clients should fail by it."""
        form = self._form(header, self._always)
        if form is None:
            return []
        name, value = self.report().in_form(form)
        return [(name.encode(), value.encode() if isinstance(value, str) else base64.b64encode(value).rstrip(b"="))]

    def grpc_metadata(self, header: bytes | None) -> tuple[tuple[str, str | bytes], ...]:
        """For the trailers of an RPC: always as protobuf, unless the request asks for another form."""
        form = self._form(header, None if self._always is None else ReportForm.BIN)
        return () if form is None else (self.report().in_form(form),)

    @staticmethod
    def _form(header: bytes | None, otherwise: ReportForm | None) -> ReportForm | None:
        if header is None:
            return otherwise
        try:
            return ReportForm(header.strip().lower().decode("latin-1"))
        except ValueError:
            return otherwise


def _double(number: int, value: float) -> bytes:
    return bytes((number << 3 | _FIXED64,)) + struct.pack("<d", value)


def _text(number: int, data: bytes) -> bytes:
    """Of at most 127 bytes: names of metrics are short."""
    return bytes((number << 3 | _BYTES, len(data))) + data
