"""The figures under the names of `vllm bench serve --save-result`, with the meanings that they have there.

Its TPOT is (E2E - TTFT) / (tokens - 1), its ITL are all gaps together, its latencies count from the send, its peak of
"tokens" per second counts pieces of output, and its peak of concurrent requests all that touch one second. Its `failed`
requests are in no latency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.loadtest.messages import Sample
from penstock.loadtest.options import Options
from penstock.loadtest.report.model import Report
from penstock.loadtest.report.others import Population, Request, there

_PERCENTILES = (50, 90, 95, 99)


def vllm_result(report: Report, samples: Sequence[Sample]) -> dict[str, Any]:
    """Of one run's samples. Latencies in milliseconds, 0 where there are none, as vLLM writes them."""
    run = Population(samples, from_first=False)
    objectives = report.goodput.objectives if report.goodput else []
    return {
        **_settings(report.date, report.label, report.options, len(samples)),
        "duration": run.seconds,
        "completed": len(run.complete),
        "failed": len(run.failed),
        "total_input_tokens": run.prompt_tokens,
        "total_output_tokens": run.output_tokens,
        "request_throughput": run.per_second(len(run.complete)),
        "request_goodput": run.per_second(run.good(objectives)) if objectives else None,
        "output_throughput": run.per_second(run.output_tokens),
        "total_token_throughput": run.per_second(run.prompt_tokens + run.output_tokens),
        "max_output_tokens_per_s": _most_pieces_in_a_second(run.complete),
        "max_concurrent_requests": _most_touching_a_second(run.complete),
        **_statistics("ttft", there([request.ttft for request in run.complete])),
        **_statistics("tpot", there([request.per_token for request in run.complete])),
        **_statistics("itl", [gap for request in run.complete for gap in request.gaps]),
        **_statistics("e2el", [request.latency for request in run.complete]),
    }


def _settings(date: str, label: str, options: Options, prompts: int) -> dict[str, Any]:
    target, load = options.target, options.load
    return {
        "date": date,
        "endpoint_type": target.protocol,
        "backend": target.protocol,
        "label": label,
        "model_id": target.model,
        "tokenizer_id": options.workload.tokenizer or target.model,
        "num_prompts": prompts,
        "request_rate": "inf" if load.rate is None else load.rate,
        "burstiness": load.burstiness if load.arrival == "gamma" else 1.0,
        "max_concurrency": load.concurrency if load.rate is None else load.max_in_flight,
    }


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, float]:
    values = np.asarray(seconds or [0.0], np.float64) * 1e3
    found = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    percentiles = np.percentile(values, _PERCENTILES)
    return found | {f"p{p}_{name}_ms": float(v) for p, v in zip(_PERCENTILES, percentiles, strict=True)}


def _most_pieces_in_a_second(requests: Sequence[Request]) -> float:
    """Seconds are counted from the first complete request's start."""
    start = min((request.start for request in requests), default=0.0)
    seconds = Counter(int(arrival - start) for request in requests for arrival in request.arrivals)
    return float(max(seconds.values(), default=0))


def _most_touching_a_second(requests: Sequence[Request]) -> int:
    """What vLLM calls concurrent: all that were there at any time of the busiest second, seldom all at once."""
    start = min((request.start for request in requests), default=0.0)
    seconds = Counter(
        second for request in requests for second in range(int(request.start - start), int(request.end - start) + 1)
    )
    return max(seconds.values(), default=0)
