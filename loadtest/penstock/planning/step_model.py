"""How long a step of the engine takes."""

from __future__ import annotations

import msgspec

from penstock.engines.simulated import LatencyModel


class StepModel(LatencyModel, frozen=True, kw_only=True):
    """The simulated engine's latency model, and what attention adds to it, which a real engine has."""

    per_attended_token: float = 0.0
    """For each token of the context that a token of the step attends to, summed over the step's tokens."""

    def seconds(self, num_sequences: int, num_tokens: int, attended: float) -> float:
        return self.step_seconds(num_sequences, num_tokens) + self.per_attended_token * attended

    def scaled(self, **factors: float) -> StepModel:
        """With some of its terms multiplied."""
        return msgspec.structs.replace(self, **{name: getattr(self, name) * by for name, by in factors.items()})
