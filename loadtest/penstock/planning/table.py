"""A plan's report as the lines that a terminal shows."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.loadtest.report.figures import GOODPUT, LATENCIES, RATES, value
from penstock.loadtest.report.formatting import number, percent, plural
from penstock.loadtest.report.markdown import table as rows_of
from penstock.planning.report import PlanReport

_STATISTICS = ("p50", "p90", "p95", "p99", "max", "mean")


def table(report: PlanReport) -> str:
    return "\n".join(["", *_lines(report), ""])


def _lines(report: PlanReport) -> Iterator[str]:
    step = report.calibration.step
    yield (
        f"A step takes {step.per_step * 1e3:.3f} ms, {step.per_sequence * 1e6:.1f} µs for each request, "
        f"{step.per_prefill_token * 1e6:.2f} µs for each prompt token and {step.per_attended_token * 1e9:.3f} ns for "
        f"each token attended to; the gateway adds {report.calibration.gateway_ms:.2f} ms, a template "
        f"{plural(report.calibration.template_tokens, 'token')}."
    )
    for path, ratios in report.calibration.fit.items():
        yield f"{path.replace('_ms.', ' ')}, measured / simulated: {', '.join(f'{ratio:.3f}' for ratio in ratios)}"
    yield ""
    if report.tries:
        yield rows_of(
            ("replicas", "", ""),
            [(str(t.replicas), "enough" if t.held else "", "; ".join(t.misses)) for t in report.tries],
        )
        needed = report.replicas_needed
        yield "No number that was tried keeps the SLO." if needed is None else f"Replicas needed: {needed}"
        yield ""
    yield from _figures(report)
    yield from _fleet(report)
    yield from _goals(report)
    simulated = plural(report.simulated_requests, "request")
    yield f"simulated: {simulated}, {report.simulated_per_s:,.0f} per second of CPU time"
    yield from (f"Note: {note}." for note in (*report.calibration.notes, *report.notes))


def _figures(report: PlanReport) -> Iterator[str]:
    yield f"{plural(report.completed, 'request')} in {number(report.duration_s)} s."
    for figure in RATES:
        yield f"{figure.title}: {number(value(report, figure.path))}"
    if report.goodput is not None:
        yield f"{GOODPUT[0].title}: {number(report.goodput.requests_per_s)} ({percent(report.goodput.share)} of all)"
    rows = [
        (f"{name}, ms", *(number(value(report, f"{field}.{statistic}")) for statistic in _STATISTICS))
        for field, (name, _) in LATENCIES.items()
        if value(report, f"{field}.p50") is not None
    ]
    if rows:
        yield ""
        yield rows_of(("", *_STATISTICS), rows)
    for kind, count in report.errors.items():
        yield f"{count:,} × {kind}"
    yield ""


def _fleet(report: PlanReport) -> Iterator[str]:
    fleet = report.fleet
    yield (
        f"replicas: {fleet.replicas_mean:.1f} on average, {fleet.replicas_most} at most, {fleet.replica_hours:.3f} "
        f"hours, {percent(fleet.busy)} of them computing"
    )
    yield (
        f"KV cache in use: {percent(fleet.kv_use_mean)} on average, {percent(fleet.kv_use_max)} at most; found in the "
        f"prefix cache: {percent(fleet.prefix_hits)} of the prompts; {plural(fleet.preemptions, 'preemption')}"
    )
    if fleet.failed_over or fleet.resumed:
        yield f"went on elsewhere: {fleet.failed_over:,} without a token, {fleet.resumed:,} behind their tokens"
    if fleet.cost is not None:
        output, both = fleet.cost_per_million_output_tokens, fleet.cost_per_million_tokens
        yield f"cost: {fleet.cost:.4g}; of a million output tokens {_money(output)}, of a million tokens {_money(both)}"


def _money(amount: float | None) -> str:
    return "–" if amount is None else f"{amount:.4g}"


def _goals(report: PlanReport) -> Iterator[str]:
    if report.slo:
        yield ""
        yield rows_of(
            ("bound", "", "estimated / allowed"),
            [(row.bound, "held" if row.held else "broken", number(row.margin)) for row in report.slo],
        )
        length = report.options.goals.slice
        yield f"over the SLO: {number(report.over_slo_s)} s, in slices of {length:g} s"
    for failure in report.failures:
        over = ""
        if failure.over_slo_s is not None:
            until = f"over the SLO until {failure.over_slo_s:.0f} s after it"
            over = f"; {until if failure.over_slo_s else 'within the SLO'}"
        yield (
            f"{failure.what}: {plural(failure.hit, 'request')} hit, {failure.resumed:,} resumed, {failure.moved:,} "
            f"begun elsewhere, {failure.failed:,} failed{over}"
        )
