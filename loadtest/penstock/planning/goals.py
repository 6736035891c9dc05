"""The goals of a fleet: whether it keeps its SLO, when it does not, and the fewest replicas that do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.loadtest.latency import parse_objectives
from penstock.loadtest.metrics import Figures
from penstock.loadtest.search.slo import Bound, margin, parse_bounds
from penstock.planning.figures import summarize
from penstock.planning.flight import Flight
from penstock.planning.options import PlanOptions
from penstock.planning.report import Bounded, FailureReport, Slice
from penstock.planning.simulate import Simulation


def fewest(enough: Callable[[int], bool], start: int, most: int) -> int | None:
    """By doubling from `start`, then halving the interval; more are assumed to be enough where fewer are. None: not
    even `most` are."""
    known: dict[int, bool] = {}

    def is_enough(number: int) -> bool:
        if number not in known:
            known[number] = enough(number)
        return known[number]

    high = min(start, most)
    while not is_enough(high):
        if high == most:
            return None
        high = min(2 * high, most)
    low = max((number for number, held in known.items() if not held), default=0)
    if low == 0:  # the first was enough: fewer may be
        while high > 1 and is_enough(max(1, high // 2)):
            high = max(1, high // 2)
        low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


def bounds_of(options: PlanOptions) -> list[Bound]:
    """None without an SLO. Raises LoadTestError."""
    objectives = parse_objectives(options.load.goodput)
    return parse_bounds(options.goals.slo, goodput=bool(objectives)) if options.goals.slo else []


def judged(figures: Figures, bounds: Sequence[Bound]) -> list[Bounded]:
    rows = [(bound, margin(figures, bound)) for bound in bounds]
    return [Bounded(bound=str(bound), held=reached <= 1, margin=reached) for bound, reached in rows]


def slices(simulation: Simulation, bounds: Sequence[Bound]) -> list[Slice]:
    """The run in parts, up to the last request that was due. Gaps between tokens are not known of a part."""
    options, length = simulation.options, simulation.options.goals.slice
    known = [bound for bound in bounds if not bound.name.startswith("itl")]
    parts: dict[int, list[Flight]] = {}
    for flight in simulation.flights:
        parts.setdefault(int(flight.due / length), []).append(flight)
    cuts = []
    for number in range(max(parts) + 1):
        flights = parts.get(number, [])
        figures = summarize(
            flights,
            None,
            open_loop=simulation.open_loop,
            objectives=parse_objectives(options.load.goodput),
            seconds=length,
            scale=simulation.fleet.scale,
        )
        looks = [look for look in simulation.looks if number <= look.at / length < number + 1]
        serving = sum(look.serving for look in looks)
        cuts.append(
            Slice(
                begin=number * length,
                requests=figures.completed + figures.failed,
                failed=figures.failed,
                ttft_ms=figures.ttft_ms,
                e2e_ms=figures.e2e_ms,
                replicas=simulation.fleet.scale * serving / max(1, len(looks)),
                kv_use=sum(look.kv_use for look in looks) / max(1, serving),
                over=_broken(figures, known) if flights else [],
            )
        )
    return cuts


def _broken(figures: Figures, bounds: Sequence[Bound]) -> list[str]:
    reasons = []
    for bound in bounds:
        lacks = bound.name.startswith("tpot") and figures.completed and figures.tpot_ms is None
        if not lacks and margin(figures, bound) > 1:
            reasons.append(str(bound))
    return reasons


def failure_reports(simulation: Simulation, parts: Sequence[Slice], bounds: Sequence[Bound]) -> list[FailureReport]:
    scale, length = simulation.fleet.scale, simulation.options.goals.slice
    reports = []
    for failure, hit in simulation.hit.items():
        failed = sum(bool(flight.error) for flight in hit)
        resumed = sum(tokens > 0 and not flight.error for flight, tokens in hit.items())
        over = [part.begin + length for part in parts if part.over and part.begin + length > failure.at]
        before = any(part.over for part in parts if part.begin + length <= failure.at)
        reports.append(
            FailureReport(
                what=str(failure),
                at=failure.at,
                hit=round(scale * len(hit)),
                resumed=round(scale * resumed),
                moved=round(scale * (len(hit) - failed - resumed)),
                failed=round(scale * failed),
                over_slo_s=None if before or not bounds else max(over) - failure.at if over else 0.0,
            )
        )
    return reports
