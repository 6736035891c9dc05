"""What operators see of a scheduler."""

from __future__ import annotations

from collections import Counter

from penstock.engines.contract.messages import EngineStats, FinishReason, RequestOutput
from penstock.engines.errors import PenstockError


class Counters:
    """Keeps the part of EngineStats that only grows."""

    def __init__(self, num_blocks: int) -> None:
        self.stats = EngineStats(num_blocks=num_blocks)
        self._finished: Counter[str] = Counter()

    def admitted(self, num_samples: int) -> None:
        self.stats.admitted += num_samples

    def preempted(self, times: int = 1) -> None:
        self.stats.preemptions += times

    def looked_up(self, num_tokens: int, num_cached: int) -> None:
        """A prompt's first look into the prefix cache."""
        self.stats.prefix_queries += num_tokens
        self.stats.prefix_hits += num_cached

    def finished(self, reason: FinishReason, error: PenstockError | None = None) -> None:
        self._finished[reason.value if error is None else f"{reason.value}:{error.code}"] += 1

    def stepped(self, num_prompt_tokens: int, outputs: list[RequestOutput]) -> None:
        """A step succeeded, and `num_prompt_tokens` of its tokens were of prompts."""
        stats = self.stats
        stats.steps += 1
        stats.prompt_tokens += num_prompt_tokens
        stats.generation_tokens += sum(len(output.token_ids) for output in outputs)

    def snapshot(self) -> EngineStats:
        """The same object each time, its gauges left to the caller."""
        self.stats.finished = dict(self._finished)
        return self.stats
