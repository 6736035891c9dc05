"""`penstock plan`: calibrates, simulates, searches, shows, writes."""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.report.file import rounded
from penstock.loadtest.search.slo import Bound, miss
from penstock.planning.calibrate import calibrate
from penstock.planning.goals import bounds_of, failure_reports, fewest, judged, slices
from penstock.planning.options import PlanOptions, options
from penstock.planning.report import Calibration, PlanReport, Try
from penstock.planning.simulate import Simulation
from penstock.planning.table import table

CANNOT, BROKEN, STOPPED = 1, 3, 130
"""Exit statuses: nothing was completed; the SLO is not kept; ended by the user."""


def main(settings: Mapping[str, Any]) -> int:
    """Returns the exit status. Raises LoadTestError."""
    chosen = options(settings)
    target = chosen.output.json
    if target not in (None, "-"):
        _touch(target)
    collects = gc.isenabled()
    gc.disable()  # what a run makes is freed by reference counts; the collector would look at all of it again and again
    try:
        report = plan(chosen)
    except KeyboardInterrupt:
        print("penstock plan: stopped", file=sys.stderr)
        return STOPPED
    finally:
        if collects:
            gc.enable()
    text = msgspec.json.format(msgspec.json.encode(rounded(msgspec.to_builtins(report))), indent=2).decode() + "\n"
    if target not in (None, "-"):
        Path(target).write_text(text)
    sys.stdout.write(text if target == "-" else table(report) + "\n")
    if not report.completed:
        return CANNOT
    return 0 if all(bound.held for bound in report.slo) else BROKEN


def _touch(path: str) -> None:
    """Fails now, and not when everything is known."""
    try:
        Path(path).touch()
    except OSError as error:
        raise LoadTestError(f"json: {path}: {error.strerror or error}") from None


def plan(chosen: PlanOptions) -> PlanReport:
    """Raises LoadTestError."""
    bounds, date = bounds_of(chosen), datetime.now(UTC)
    calibration = calibrate(chosen.engine)
    tries: list[Try] = []
    needed = None
    if chosen.goals.find_replicas:

        def attempt(replicas: int) -> bool:
            simulation = _simulated(chosen, calibration, replicas)
            misses = _misses(simulation, bounds)
            tries.append(Try(replicas=replicas, held=not misses, misses=misses))
            print(f"{replicas} replicas: {'; '.join(misses) or 'enough'}", file=sys.stderr)
            return not misses

        needed = fewest(attempt, chosen.fleet.replicas, chosen.goals.most_replicas)
    simulation = _simulated(chosen, calibration, needed or (chosen.fleet.replicas if not tries else tries[-1].replicas))
    figures = simulation.figures()
    parts = slices(simulation, bounds)
    over = sum(chosen.goals.slice for part in parts if part.over)
    return PlanReport(
        **{name: getattr(figures, name) for name in figures.__struct_fields__},
        date=date.isoformat(timespec="seconds"),
        command=shlex.join(["penstock", *sys.argv[1:]]),
        options=simulation.options,
        calibration=calibration,
        fleet=simulation.fleet_figures(figures),
        slo=judged(figures, bounds),
        over_slo_s=over if bounds else None,
        tries=tries,
        replicas_needed=needed,
        failures=failure_reports(simulation, parts, bounds),
        slices=parts,
        simulated_requests=len(simulation.flights),
        simulated_per_s=len(simulation.flights) / max(simulation.cpu_seconds, 1e-9),
        notes=_notes(simulation),
    )


def _simulated(chosen: PlanOptions, calibration: Calibration, replicas: int) -> Simulation:
    simulation = Simulation(replace(chosen, fleet=replace(chosen.fleet, replicas=replicas)), calibration)
    simulation.run()
    return simulation


def _misses(simulation: Simulation, bounds: Sequence[Bound]) -> list[str]:
    figures = simulation.figures()
    return [miss(figures, bound) for bound, row in zip(bounds, judged(figures, bounds), strict=True) if not row.held]


def _notes(simulation: Simulation) -> list[str]:
    notes, scale = [], simulation.fleet.scale
    if scale > 1:
        notes.append(f"one gateway in {scale:.3g} was simulated; the others are assumed to be alike")
    missed = [failure for failure in simulation.failures if failure not in simulation.hit]
    notes += [f"{failure}: the run was over before" for failure in missed]
    return notes
