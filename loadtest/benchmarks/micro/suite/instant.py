"""An engine with a scheduler of its own that costs next to nothing, and the admission queue in front of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from penstock.engines.autonomous.core import AutonomousCore
from penstock.engines.contract.continuous_batcher import BatcherOutput, NewTokens, StartRequest
from penstock.engines.contract.messages import AddRequest, FinishReason, SamplingParams
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.kvcache import KVGroup

_PROMPT = 256


class InstantBatcher:
    """Implements ContinuousBatcher. Each request gets one token in every step, and ends with its last."""

    wakeup: int | None = None
    num_free_blocks = 1 << 20

    def __init__(self) -> None:
        self.info = ModelInfo(
            vocab_size=32_000,
            max_model_len=1 << 20,
            kv_groups=(KVGroup(16),),
            num_blocks=self.num_free_blocks,
            eos_token_ids=(),
            runner="instant",
        )
        self._left: dict[int, int] = {}
        self._aborted: list[int] = []

    def start(self, request: StartRequest) -> None:
        self._left[request.id] = request.params.max_tokens

    def abort(self, ids: Sequence[int]) -> None:
        for request_id in ids:
            if self._left.pop(request_id, None) is not None:
                self._aborted.append(request_id)

    def step(self) -> BatcherOutput:
        left = self._left
        tokens: list[NewTokens] = []
        for request_id in tuple(left):
            left[request_id] -= 1
            if left[request_id]:
                tokens.append(NewTokens(request_id, [7]))
            else:
                tokens.append(NewTokens(request_id, [7], FinishReason.LENGTH))
                del left[request_id]
        released, self._aborted = self._aborted, []
        return BatcherOutput(tokens, released, num_scheduled_tokens=len(tokens))

    def reset_prefix_cache(self) -> None:
        """There is none."""

    def close(self) -> None:
        """There is nothing to free."""


def queue(num_running: int, num_waiting: int = 0) -> AutonomousCore:
    """With so many seats, and room for so many behind them."""
    config = SchedulerConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=max(8192, num_running),
        max_queued_requests=num_waiting,
        max_queued_tokens=1 << 40,
    )
    return AutonomousCore(InstantBatcher(), config, lambda: 1e9)


def arrivals(max_tokens: int) -> Iterator[AddRequest]:
    params = SamplingParams(max_tokens=max_tokens)
    for request_id in count(1):
        yield AddRequest((request_id,), list(range(_PROMPT)), params, float(request_id))
