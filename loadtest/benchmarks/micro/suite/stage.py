"""A scheduler in the middle of its work, for the benchmarks of its steps."""

from __future__ import annotations

from itertools import count

from penstock.engines.contract.messages import AddRequest, SamplingParams
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step import ModelRunnerOutput
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.queues import Policy
from penstock.engines.scheduler.scheduler import Scheduler
from penstock.kvcache import KVGroup

_BLOCK_SIZE = 16
_PROMPT = 256
_LONG = 1 << 20


class Stage:
    """Prompts are all different: no request finds another's prefix."""

    def __init__(self, config: SchedulerConfig, num_blocks: int) -> None:
        info = ModelInfo(
            vocab_size=_LONG,
            max_model_len=_LONG,
            kv_groups=(KVGroup(_BLOCK_SIZE),),
            num_blocks=num_blocks,
            eos_token_ids=(),
            runner="none",
        )
        self.scheduler = Scheduler(config, info)
        self._ids = count(1)

    def add(self, number: int, prompt_tokens: int, max_tokens: int) -> None:
        for request_id in (next(self._ids) for _ in range(number)):
            prompt = [request_id, *range(prompt_tokens - 1)]
            params = SamplingParams(max_tokens=max_tokens)
            self.scheduler.add(
                AddRequest((request_id,), prompt, params, float(request_id), tenant=str(request_id % 10))
            )

    def step(self) -> None:
        """One iteration; every request whose known tokens are all computed gets a new one."""
        scheduler = self.scheduler
        step = scheduler.schedule(1e9)
        sampled = [[7]] * len(step.request_ids)
        if len(step.request_ids) != step.total_num_scheduled_tokens:
            for index, run in enumerate(scheduler.under_way[-1].runs):
                sampled[index] = [7] if run.num_pending_tokens else []
        scheduler.update_from_output(ModelRunnerOutput(sampled), 1e9, 0.01)
        scheduler.take_outputs()

    @property
    def in_prompts(self) -> bool:
        return any(count > 1 for _, count in self.scheduler.running.ready()[1])


def decoding(num_running: int, num_waiting: int, policy: str, steps: int) -> Stage:
    """So many requests decode for at least `steps` more steps, so many wait behind them."""
    config = SchedulerConfig(
        itl_target_ms=0,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(8192, num_running),
        max_queued_requests=num_waiting,
        max_queued_tokens=1 << 40,
        policy=Policy(policy),
    )
    prefill = -(-num_running * _PROMPT // config.max_num_batched_tokens)
    length = _PROMPT + prefill + 2 * steps
    stage = Stage(config, num_running * (length // _BLOCK_SIZE + 2))
    stage.add(num_running, _PROMPT, length)
    while len(stage.scheduler.running.runs) < num_running or stage.in_prompts:
        stage.step()
    stage.add(num_waiting, _PROMPT, length)
    stage.step()
    return stage


def prefilling(steps: int) -> Stage:
    """Each step takes the next 512 tokens of prompts of 1600: a whole number of them takes `steps` steps or more."""
    budget, prompt = 512, 1600
    number = -(-steps * budget // prompt) + 1
    config = SchedulerConfig(
        itl_target_ms=0, max_num_seqs=number, max_num_batched_tokens=budget, max_queued_tokens=_LONG
    )
    stage = Stage(config, number * (prompt // _BLOCK_SIZE + 1))
    stage.add(number, prompt, 1)
    return stage


def storm(steps: int) -> Stage:
    """Requests that grow from one block to three in a pool of little more than a block for each seat, and others behind
    them: in every step some have to go, and some of those that went come back."""
    seats = 256
    config = SchedulerConfig(
        itl_target_ms=0,
        max_num_seqs=seats,
        max_num_batched_tokens=8192,
        max_queued_requests=8 * steps,
        max_queued_tokens=_LONG,
    )
    stage = Stage(config, seats * 6 // 5)
    stage.add(seats + 8 * steps, _BLOCK_SIZE // 2, 40)
    while not stage.scheduler.stats().preemptions:
        stage.step()
    return stage
