"""The figures of a run as other tools define them, from the samples: equal names often mean other things."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.loadtest.errors import INTERRUPTED
from penstock.loadtest.latency import Objective, gaps
from penstock.loadtest.messages import Sample
from penstock.loadtest.options import Options
from penstock.loadtest.report.model import Report


class Request:
    """A complete request, in seconds, as vLLM bench and AIPerf both see it: it begins before its connection is made,
    and ends with the last piece of output, whatever follows (usage, [DONE])."""

    def __init__(self, sample: Sample) -> None:
        self.start = sample.sent - sample.connect
        self.end = sample.arrivals[-1] if sample.arrivals else sample.ended
        self.ttft = sample.arrivals[0] - self.start if sample.arrivals else None
        self.latency = self.end - self.start
        self.gaps = gaps(sample)
        self.arrivals = sample.arrivals
        self.tokens = sample.tokens
        self.prompt_tokens = sample.prompt_tokens or sample.wanted_prompt_tokens or 0

    @property
    def per_token(self) -> float | None:
        """(E2E - TTFT) / (tokens - 1): vLLM calls it TPOT, AIPerf inter token latency. Both take the first piece for
        one token."""
        if self.ttft is None or self.tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.tokens - 1)

    def keeps(self, objective: Objective) -> bool:
        """A request without the figure keeps its bound. `itl` bounds the longest gap, which neither tool offers."""
        value = {
            "ttft": self.ttft,
            "tpot": self.per_token,
            "itl": max(self.gaps, default=None),
            "e2e": self.latency,
        }[objective.name]
        return value is None or 1e3 * value <= objective.milliseconds


class Population:
    """What one run's samples are for other tools. Interrupted ones are in no figure.

    `from_first`: the run begins with its first request, not when it was started.
    """

    def __init__(self, samples: Sequence[Sample], *, from_first: bool) -> None:
        counted = [sample for sample in samples if sample.error != INTERRUPTED]
        self.complete = [Request(sample) for sample in counted if not sample.error]
        self.failed = [sample for sample in counted if sample.error]
        started = min((sample.sent - sample.connect for sample in counted), default=0.0) if from_first else 0.0
        self.seconds = max((sample.ended for sample in counted), default=0.0) - started

    def good(self, objectives: Sequence[Objective]) -> int:
        return sum(all(request.keeps(objective) for objective in objectives) for request in self.complete)

    def per_second(self, amount: float) -> float:
        return amount / self.seconds if self.seconds > 0 else 0.0

    @property
    def output_tokens(self) -> int:
        return sum(request.tokens for request in self.complete)

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.complete)


def there(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


# The figures under the names of `vllm bench serve --save-result`, with the meanings that they have there.
#
# Its TPOT is (E2E - TTFT) / (tokens - 1), its ITL are all gaps together, its latencies count from the send, its peak
# of "tokens" per second counts pieces of output, and its peak of concurrent requests all that touch one second. Its
# `failed` requests are in no latency.

_VLLM_PERCENTILES = (50, 90, 95, 99)


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
    statistics = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    percentiles = np.percentile(values, _VLLM_PERCENTILES)
    return statistics | {f"p{p}_{name}_ms": float(v) for p, v in zip(_VLLM_PERCENTILES, percentiles, strict=True)}


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


# The figures under the names of AIPerf's profile_export_aiperf.json, with the meanings that they have there.
#
# Its inter_token_latency is a figure of each request, (E2E - TTFT) / (tokens - 1), near our TPOT; its
# inter_chunk_latency are the gaps that we call ITL; its duration begins with the first request.

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
    scaled = np.asarray(values, np.float64) * factor
    percentiles = np.percentile(scaled, _PERCENTILES)
    block = {
        "unit": unit,
        "avg": float(scaled.mean()),
        "min": float(scaled.min()),
        "max": float(scaled.max()),
        "std": float(scaled.std()),
        "count": len(scaled),
        "sum": float(scaled.sum()),
    }
    return {tag: block | {f"p{p}": float(v) for p, v in zip(_PERCENTILES, percentiles, strict=True)}}


def _single(unit: str, value: float) -> dict[str, Any]:
    return {"unit": unit, "avg": float(value)}
