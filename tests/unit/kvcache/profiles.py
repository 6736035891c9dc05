"""How hard the state machines search: a little on every change, for long in the nightly run (HYPOTHESIS_PROFILE)."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_EXAMPLES = {"ci": 1.0, "nightly": 30.0}


def machine_settings(max_examples: int, step_count: int) -> settings:
    """Settings for a state machine that runs `max_examples` in CI. A failure prints the blob that reproduces it."""
    factor = _EXAMPLES.get(os.environ.get("HYPOTHESIS_PROFILE", "ci"), 1.0)
    return settings(
        max_examples=int(max_examples * factor),
        stateful_step_count=step_count,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
