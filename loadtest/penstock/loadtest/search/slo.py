"""Bounds on a whole run: whether it keeps them, and by what margin."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.latency import parse_objectives
from penstock.loadtest.metrics import Figures
from penstock.loadtest.options import Options, check_latencies
from penstock.loadtest.report.figures import LATENCIES, value
from penstock.loadtest.report.formatting import number, percent

_STATISTICS = ("p50", "p90", "p95", "p99", "max", "mean")
_ERRORS = 0.01
"""Share of failed requests that is allowed, unless something else is said: failures are in no latency, so that a server
that refuses what it cannot do in time would keep every other bound."""


class Bound(msgspec.Struct, frozen=True):
    name: str
    """As it was written: `ttft_p99`, `goodput`, `errors`."""
    limit: float
    """Milliseconds, or a share."""

    @property
    def path(self) -> str:
        """Of the figure in a report."""
        field, _, statistic = self.name.partition("_")
        return f"{field}_ms.{statistic}" if statistic else "goodput.share"

    def __str__(self) -> str:
        if self.name == "errors":
            return f"failed requests ≤ {percent(self.limit)}"
        if self.name == "goodput":
            return f"good requests ≥ {percent(self.limit)}"
        field, _, statistic = self.name.partition("_")
        return f"{LATENCIES[f'{field}_ms'][0]} {statistic} ≤ {self.limit:g} ms"


def parse_bounds(texts: Sequence[str], *, goodput: bool) -> list[Bound]:
    """From `ttft_p99:500`; several may stand in one text, with spaces between. `goodput`: whether the run says what a
    good request is. There is always a bound on errors. Raises LoadTestError."""
    bounds = [_bound(text) for several in texts for text in several.split()]
    names = [bound.name for bound in bounds]
    if twice := {name for name in names if names.count(name) > 1}:
        raise LoadTestError(f"slo: {', '.join(sorted(twice))} is bounded twice")
    if "goodput" in names and not goodput:
        raise LoadTestError("slo: what is a good request? (--goodput 'ttft:200 tpot:20')")
    return bounds if "errors" in names else [*bounds, Bound("errors", _ERRORS)]


def bounds_of(slo: Sequence[str], options: Options) -> list[Bound]:
    """Of runs with these settings. Raises LoadTestError also for bounds, `--goodput` among them, on what such runs
    never have: nothing need be sent to find that out."""
    objectives = parse_objectives(options.load.goodput)
    bounds = parse_bounds(slo, goodput=bool(objectives))
    check_latencies(options.target, [bound.name.partition("_")[0] for bound in bounds], "slo")
    check_latencies(options.target, [objective.name for objective in objectives], "goodput")
    return bounds


def _bound(text: str) -> Bound:
    name, _, written = text.partition(":")
    field, _, statistic = name.partition("_")
    try:
        limit = float(written)
    except ValueError:
        limit = math.nan
    share = name in ("goodput", "errors")
    if not share and (f"{field}_ms" not in LATENCIES or statistic not in _STATISTICS):
        known = ", ".join(field.removesuffix("_ms") for field in LATENCIES)
        raise LoadTestError(
            f"slo: {text!r} is not a bound such as ttft_p99:500 ({known}; {', '.join(_STATISTICS)}), goodput:0.95 or "
            "errors:0.01"
        )
    if not math.isfinite(limit) or limit < 0 or (limit == 0 and name != "errors") or (share and limit > 1):
        kind = "a share between 0 and 1" if share else "milliseconds above 0"
        raise LoadTestError(f"slo: {text!r}: {written!r} is not {kind}")
    return Bound(name, limit)


def margin(report: Figures, bound: Bound) -> float:
    """Measured / allowed, or for least shares the other way round: above 1 the bound is broken. Infinite where nothing
    was measured since nothing was completed. Raises LoadTestError for a figure that such runs never have."""
    if not report.completed:
        return math.inf
    if bound.name == "errors":
        return _ratio(report.failed / report.ended, bound.limit)
    measured = value(report, bound.path)
    if measured is None:
        raise LoadTestError(f"slo: these runs have no {bound.name.replace('_', ' ')}")
    return _ratio(bound.limit, measured) if bound.name == "goodput" else _ratio(measured, bound.limit)


def _ratio(above: float, below: float) -> float:
    if below == 0:
        return math.inf if above else 0.0
    return above / below


def margins(report: Figures, bounds: Sequence[Bound]) -> dict[Bound, float]:
    return {bound: margin(report, bound) for bound in bounds}


def miss(report: Figures, bound: Bound) -> str:
    """A bound that was broken, with what was measured."""
    if not report.completed:
        return f"{bound}: nothing was completed"
    if bound.name == "errors":
        return f"{bound}: {percent(report.failed / report.ended)}"
    measured = value(report, bound.path) or 0.0
    return f"{bound}: {percent(measured) if bound.name == 'goodput' else f'{number(measured)} ms'}"
