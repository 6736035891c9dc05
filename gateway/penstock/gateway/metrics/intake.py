"""What is taken in and refused before any queue."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.gateway.front.intake import Intake, WorkPools


class IntakeMetrics:
    def __init__(self, intake: Intake, pools: WorkPools) -> None:
        self._intake = intake
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        bodies, lag, pools = self._intake.bodies, self._intake.lag, (self._pools.text, self._pools.tensors)
        text = "How late the event loop runs what is due, of late."
        yield GaugeMetricFamily("penstock_event_loop_lag_seconds", text, value=lag.recent)
        text = "Bytes of request bodies in memory, without small ones over HTTP."
        yield GaugeMetricFamily("penstock_body_bytes", text, value=bodies.held)
        yield GaugeMetricFamily("penstock_body_bytes_limit", "How many there may be.", value=bodies.limit)
        unread = self._intake.unread
        text = "Bytes of answers over HTTP/2 and gRPC that wait for their clients to read them."
        yield GaugeMetricFamily("penstock_unread_answer_bytes", text, value=unread.held)
        text = "Connections closed because all clients together had not read too much."
        yield CounterMetricFamily("penstock_unread_closed", text, value=unread.closed)
        text = "Work that waits or runs in threads: characters of text, bytes of tensor data."
        work = GaugeMetricFamily("penstock_work", text, labels=["kind"])
        for pool in pools:
            work.add_metric([pool.kind], pool.cost)
        yield work
        text = "Requests refused before any queue, by what was full."
        refused = CounterMetricFamily("penstock_front_refused", text, labels=["full"])
        for name, count in (("bodies", bodies.refused), ("event loop", lag.refused)):
            refused.add_metric([name], count)
        for pool in pools:
            refused.add_metric([pool.kind], pool.refused)
        yield refused
