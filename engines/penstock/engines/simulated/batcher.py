"""A simulated engine with a scheduler of its own: our scheduler and the simulated runner, seen from outside as one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from penstock.engines.contract.continuous_batcher import BatcherOutput, NewTokens, StartRequest
from penstock.engines.contract.messages import AddRequest, FinishReason, RequestOutput
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import from_code
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.scheduler import Scheduler
from penstock.engines.simulated.runner import SimulatedConfig, SimulatedRunner


class SimulatedBatcherConfig(SimulatedConfig, frozen=True, kw_only=True):
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    prefix_caching: bool = True
    own_thread: bool = False
    """It runs by itself and says so through `wakeup`, like TensorRT-LLM; otherwise it advances in `step`, like vLLM."""
    abort_after: int | None = 0
    """Iterations that an aborted request goes on for; None: it never gives its seat back."""


class SimulatedBatcher:
    """Implements ContinuousBatcher and AdapterHost. The same request gets the same tokens as from SimulatedRunner."""

    wakeup: int | None = None

    def __init__(self, config: SimulatedBatcherConfig, sleep: Callable[[float], None] = time.sleep) -> None:
        self._runner = SimulatedRunner(config, sleep)
        limits = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.prefix_caching,
        )
        self._scheduler = Scheduler(limits, self._runner.info)
        self.info: ModelInfo = msgspec.structs.replace(
            self._scheduler.info, supports_pooling=False, supports_drafts=False
        )
        """Its seam has no word for either."""
        self._abort_after = config.abort_after
        self._dying: dict[int, int] = {}
        """Aborted ids -> iterations that they have left."""
        self._undead: set[int] = set()
        self._num_started = 0

    @property
    def num_free_blocks(self) -> int:
        return self._scheduler.kv.pool.num_free

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_requests or bool(self._dying)

    def start(self, request: StartRequest) -> None:
        self._num_started += 1  # stands for the time of arrival: first come, first served
        self._scheduler.add(
            AddRequest(
                (request.id,),
                request.prompt_token_ids,
                msgspec.structs.replace(request.params, seed=request.seed),
                self._num_started,
                cache_salt=request.cache_salt,
                adapter=request.adapter,
            )
        )

    def abort(self, ids: Sequence[int]) -> None:
        if self._abort_after is None:
            self._undead.update(ids)
        else:
            self._dying.update(dict.fromkeys(ids, self._abort_after))

    def step(self) -> BatcherOutput:
        """One iteration. A fault of kind `raise` comes out as RuntimeError."""
        released = [i for i, left in self._dying.items() if not left]
        self._scheduler.abort(released, 0.0)
        self._dying = {i: left - 1 for i, left in self._dying.items() if left}
        preemptions = self._scheduler.stats().preemptions
        step = self._scheduler.schedule(0.0)
        if step.request_ids:
            self._runner.submit(step)
            self._scheduler.update_from_output(self._runner.collect(), 0.0)
        result = BatcherOutput(released=released, num_scheduled_tokens=step.total_num_scheduled_tokens)
        result.num_preemptions = self._scheduler.stats().preemptions - preemptions
        for output in self._scheduler.take_outputs():
            if output.finish_reason is FinishReason.ABORT or output.id in self._undead:
                continue
            if output.finish_reason is not None:
                self._dying.pop(output.id, None)
            result.tokens.append(_new_tokens(output))
        return result

    def reset_prefix_cache(self) -> None:
        self._scheduler.kv.pool.clear_cache()

    def prepare_adapter(self, key: str, folder: Path) -> Path:
        return self._runner.prepare_adapter(key, folder)

    def install_adapter(self, key: str, prepared: Path) -> None:
        self._runner.install_adapter(key, prepared)

    def unload_adapter(self, key: str) -> None:
        self._runner.unload_adapter(key)

    def close(self) -> None:
        self._runner.close()


def _new_tokens(output: RequestOutput) -> NewTokens:
    return NewTokens(
        output.id,
        output.token_ids,
        output.finish_reason,
        output.stop_token_id,
        num_cached_tokens=output.prompt.num_cached_tokens if output.prompt is not None else 0,
        error=from_code(output.error.code, output.error.message) if output.error is not None else None,
    )
