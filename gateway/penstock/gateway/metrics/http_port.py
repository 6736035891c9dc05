"""What is open on the HTTP port."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric


class HttpPortMetrics:
    def __init__(self, connections: Callable[[], Mapping[str, int]]) -> None:
        """`connections` gives how many there are, by version."""
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        text = "Open connections of the HTTP port, by the version of HTTP."
        found = GaugeMetricFamily("penstock_http_connections", text, labels=["version"])
        for version, count in self._connections().items():
            found.add_metric([version], count)
        yield found
