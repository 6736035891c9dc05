"""From requests to the figures of a load test, by the same definitions (docs/loadtest.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from penstock.loadtest.latency import Latencies, Objective, is_good
from penstock.loadtest.metrics import PERCENTILES, Distribution, Figures, FromSend, Goodput
from penstock.planning.flight import GAP_UNIT, Flight, Gaps


def latencies(flight: Flight) -> Latencies:
    """Of one that has ended."""
    first, ended = flight.first, flight.ended or 0.0
    rest = flight.num_tokens - 1
    return Latencies(
        ttft=None if first is None else first - flight.due,
        tpot=None if first is None or rest < 1 else (flight.last - first) / rest,
        itl=flight.longest_gap,
        e2e=ended - flight.due,
    )


def summarize(
    flights: Sequence[Flight],
    gaps: Gaps | None,
    *,
    open_loop: bool,
    objectives: Sequence[Objective],
    seconds: float,
    scale: float,
) -> Figures:
    """`flights` have ended. `gaps`: None where they are not known by themselves. `scale`: of each request that was
    simulated there were so many."""
    good = [flight for flight in flights if not flight.error]
    measured = [latencies(flight) for flight in good]
    ttft = Distribution.of([value.ttft for value in measured if value.ttft is not None])
    e2e = Distribution.of([value.e2e for value in measured])
    output = round(scale * sum(flight.num_tokens for flight in good))
    prompt = round(scale * sum(flight.num_prompt_tokens for flight in good))

    def per_second(amount: float) -> float:
        return round(amount / seconds, 3) if seconds else 0.0

    kept = sum(is_good(value, objectives) for value in measured)
    goodput = Goodput(
        objectives=list(objectives),
        good=round(scale * kept),
        share=round(kept / len(flights), 4) if flights else 0.0,
        requests_per_s=per_second(scale * kept),
    )
    return Figures(
        ttft_ms=ttft,
        itl_ms=None if gaps is None else distribution_of(gaps),
        tpot_ms=Distribution.of([value.tpot for value in measured if value.tpot is not None]),
        e2e_ms=e2e,
        latency_from="intended" if open_loop else "sent",
        from_send=FromSend(ttft_ms=ttft, e2e_ms=e2e),
        output_tokens_per_s=per_second(output),
        total_tokens_per_s=per_second(output + prompt),
        requests_per_s=per_second(scale * len(good)),
        completed=round(scale * len(good)),
        errors={kind: round(scale * n) for kind, n in Counter(flight.error for flight in flights).items() if kind},
        error_details={},
        interrupted=0,
        duration_s=round(seconds, 3),
        output_tokens=output,
        prompt_tokens=prompt,
        goodput=goodput if objectives else None,
    )


def distribution_of(gaps: Gaps) -> Distribution | None:
    """Percentiles as of the list of all gaps, which is never made."""
    if not gaps.counts:
        return None
    values = np.array(sorted(gaps.counts), np.float64) * GAP_UNIT * 1e3
    counts = np.array([gaps.counts[key] for key in sorted(gaps.counts)], np.int64)
    ends, total = np.cumsum(counts), int(counts.sum())

    def at(percent: float) -> float:
        place = (total - 1) * percent / 100
        below = values[np.searchsorted(ends, int(place), side="right")]
        above = values[np.searchsorted(ends, min(int(place) + 1, total - 1), side="right")]
        return round(float(below + (above - below) * (place - int(place))), 3)

    p50, p90, p95, p99 = map(at, PERCENTILES)
    mean = float((values * counts).sum() / total)
    std = float(np.sqrt((counts * (values - mean) ** 2).sum() / total))
    return Distribution(
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=round(float(values[-1]), 3),
        min=round(float(values[0]), 3),
        mean=round(mean, 3),
        std=round(std, 3),
        count=total,
    )
