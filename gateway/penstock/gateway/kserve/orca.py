"""Load reports in response headers, for load balancers: Open Request Cost Aggregation (ORCA).

Formats: https://github.com/cncf/xds/blob/main/xds/data/orca/v3/orca_load_report.proto, as JSON or as a list of
`<field>.<key>=<value>`; the header's value starts with the format's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from penstock.gateway.http.exchange import Exchange, Headers

LoadMetrics = Callable[[], Mapping[str, float]]
"""Gives what is reported now: `kv_cache_utilization`, `max_token_capacity`, ..."""

ORCA_HEADER = b"endpoint-load-metrics-format"
_RESPONSE = b"endpoint-load-metrics"


def load_headers(exchange: Exchange, load_metrics: LoadMetrics | None) -> Headers:
    """The header that the request asks for, if it asks and there is something to report.

    None for other formats, as in Triton: it is a load balancer that asks, and no request of its clients should fail
    because it asks for more than we have.
    """
    wanted = exchange.headers.get(ORCA_HEADER)
    if wanted is None or load_metrics is None:
        return []
    form = wanted.strip().lower()
    metrics = load_metrics() if form in (b"text", b"json") else {}
    if not metrics:
        return []
    if form == b"json":
        return [(_RESPONSE, b"JSON " + msgspec.json.encode({"named_metrics": dict(metrics)}))]
    parts = (f"named_metrics.{name}={value:.6f}".removesuffix(".000000") for name, value in metrics.items())
    return [(_RESPONSE, b"TEXT " + ", ".join(parts).encode())]
