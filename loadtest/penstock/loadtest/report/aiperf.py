"""The figures under the names of AIPerf's profile_export_aiperf.json, with the meanings that they have there.

Its inter_token_latency is a figure of each request, (E2E - TTFT) / (tokens - 1), near our TPOT; its
inter_chunk_latency are the gaps that we call ITL; its duration begins with the first request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.loadtest.messages import Sample
from penstock.loadtest.report.model import Report
from penstock.loadtest.report.others import Population, Request, there

_SCHEMA = "1.1"
"""Of AIPerf's export: the blocks that are written here have `count` and `sum`, which 1.1 brought."""
_PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


def aiperf_result(report: Report, samples: Sequence[Sample]) -> dict[str, Any]:
    """Of one run's samples. A metric that no request has is left out, as AIPerf does."""
    run = Population(samples, from_first=True)
    return {
        "schema_version": _SCHEMA,
        "start_time": report.date,
        "was_cancelled": report.interrupted_by_user,
        "run_info": {
            "random_seed": report.options.workload.seed,
            "run_label": report.label,
            "cli_command": report.command,
        },
        "error_summary": [
            {"error_details": {"type": kind, "message": report.error_details.get(kind, "")}, "count": count}
            for kind, count in Counter(sample.error for sample in run.failed).items()
        ],
        **_latencies(run.complete),
        **_lengths(run.complete),
        **_totals(run),
        **_goodput(report, run),
    }


def _latencies(requests: Sequence[Request]) -> dict[str, Any]:
    ttft = there([request.ttft for request in requests])
    per_token = there([request.per_token for request in requests])
    return {
        **_record("time_to_first_token", "ms", ttft, 1e3),
        **_record("inter_token_latency", "ms", per_token, 1e3),
        **_record("inter_chunk_latency", "ms", [gap for request in requests for gap in request.gaps], 1e3),
        **_record("request_latency", "ms", [request.latency for request in requests], 1e3),
        **_record("output_token_throughput_per_user", "tokens/sec/user", [1 / value for value in per_token if value]),
    }


def _lengths(requests: Sequence[Request]) -> dict[str, Any]:
    return {
        **_record("output_sequence_length", "tokens", [float(r.tokens) for r in requests if r.tokens]),
        **_record("input_sequence_length", "tokens", [float(r.prompt_tokens) for r in requests if r.prompt_tokens]),
    }


def _totals(run: Population) -> dict[str, Any]:
    return {
        "request_count": _single("requests", len(run.complete)),
        **({"error_request_count": _single("requests", len(run.failed))} if run.failed else {}),
        "benchmark_duration": _single("sec", run.seconds),
        "request_throughput": _single("requests/sec", run.per_second(len(run.complete))),
        "output_token_throughput": _single("tokens/sec", run.per_second(run.output_tokens)),
        "total_token_throughput": _single("tokens/sec", run.per_second(run.output_tokens + run.prompt_tokens)),
        "total_output_tokens": _single("tokens", run.output_tokens),
        "total_isl": _single("tokens", run.prompt_tokens),
        "total_osl": _single("tokens", run.output_tokens),
    }


def _goodput(report: Report, run: Population) -> dict[str, Any]:
    if report.goodput is None:
        return {}
    good = run.good(report.goodput.objectives)
    return {"good_request_count": _single("requests", good), "goodput": _single("requests/sec", run.per_second(good))}


def _record(tag: str, unit: str, values: Sequence[float], factor: float = 1.0) -> dict[str, Any]:
    if not values:
        return {}
    found = np.asarray(values, np.float64) * factor
    percentiles = np.percentile(found, _PERCENTILES)
    block = {
        "unit": unit,
        "avg": float(found.mean()),
        "min": float(found.min()),
        "max": float(found.max()),
        "std": float(found.std()),
        "count": len(found),
        "sum": float(found.sum()),
    }
    return {tag: block | {f"p{p}": float(v) for p, v in zip(_PERCENTILES, percentiles, strict=True)}}


def _single(unit: str, value: float) -> dict[str, Any]:
    return {"unit": unit, "avg": float(value)}
