"""How hard the state machines search: a little on every change, for long in the nightly run (HYPOTHESIS_PROFILE)."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

_FACTORS = {"ci": 1, "nightly": 30}
_FACTOR = _FACTORS[os.environ.get("HYPOTHESIS_PROFILE", "ci")]

MACHINE_TIMEOUT = pytest.mark.timeout(120 * _FACTOR)
"""A mark for the modules of state machines."""


def machine_settings(max_examples: int, step_count: int) -> settings:
    """Settings for a state machine that runs `max_examples` in CI. A failure prints the blob that reproduces it."""
    return settings(
        max_examples=max_examples * _FACTOR,
        stateful_step_count=step_count,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
