"""Fleets for tests of plans."""

from __future__ import annotations

from typing import Any

from penstock.planning.engine import StepModel
from penstock.planning.options import PlanOptions, options
from penstock.planning.report import Calibration
from penstock.planning.simulate import Simulation

STEP = StepModel(per_step=0.015, per_sequence=0.0005, per_prefill_token=50e-6)
REPLICA = Calibration(step=STEP, gateway_ms=2.0, template_tokens=0)


def planned(calibration: Calibration = REPLICA, *, leaps: bool = True, **settings: Any) -> Simulation:
    """A run that is over."""
    chosen: PlanOptions = options(settings)
    simulation = Simulation(chosen, calibration)
    for replica in simulation.fleet.replicas.values():
        replica.engine.may_leap = leaps
    simulation.run()
    return simulation
