"""The figures of a run as other tools define them, from the samples: equal names often mean other things."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.loadtest.errors import INTERRUPTED
from penstock.loadtest.goodput import Objective
from penstock.loadtest.latency import gaps
from penstock.loadtest.messages import Sample


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
