"""When an engine process sends messages: one for each step, or one for several if steps are very short."""

from __future__ import annotations

from collections.abc import Callable

from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.messages import CallReply, RequestOutput, StepOutputs, StepRecord


class Publisher:
    """Holds back the tokens of running streams until `interval` seconds have passed since the last message.

    First tokens, ends, errors and replies leave at once, together with what was held back. A small model takes less
    than a millisecond for a step; waking the gateway and all clients for each would take cores away from the model.
    """

    def __init__(self, send: Callable[[StepOutputs], None], interval: float, clock: Callable[[], float]) -> None:
        self._send = send
        self._interval = interval
        self._clock = clock
        self._last_sent = clock()
        self._outputs: list[RequestOutput] = []
        self._steps: list[StepRecord] = []
        self._replies: list[CallReply] = []

    def add(self, result: StepOutputs) -> None:
        """Takes in one step's result."""
        self._outputs += result.outputs
        self._steps += result.steps
        self._replies += result.replies
        if result.replies or any(map(_is_urgent, result.outputs)) or self._since_last() >= self._interval:
            self.flush(result.stats)

    def flush(self, stats: EngineStats) -> None:
        """Sends everything there is; with nothing held back, the stats alone."""
        self._send(StepOutputs(self._outputs, stats, self._steps, self._replies))
        self._outputs, self._steps, self._replies = [], [], []
        self._last_sent = self._clock()

    @property
    def holds_back(self) -> bool:
        return bool(self._outputs or self._steps)

    def patience(self, at_idle: float) -> float:
        """Seconds until the next `flush` is due: for what is held back, or for newer stats every `at_idle` seconds."""
        return max(0.0, (self._interval if self.holds_back else at_idle) - self._since_last())

    def _since_last(self) -> float:
        return self._clock() - self._last_sent


def _is_urgent(output: RequestOutput) -> bool:
    return output.finish_reason is not None or output.prompt is not None
