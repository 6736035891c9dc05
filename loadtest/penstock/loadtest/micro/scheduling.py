"""What a step costs besides the model: `schedule` and `update_from_output`, with a runner that costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from penstock.engines.messages import AddRequest, SamplingParams
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.output import ModelRunnerOutput
from penstock.engines.scheduler.policy import Policy
from penstock.engines.scheduler.scheduler import Scheduler
from penstock.kvcache import KVCacheManager
from penstock.loadtest.micro.timing import Measurement, measure

_BLOCK_SIZE = 16
_PROMPT = 256
_STEPS = 200


class Stage:
    """A scheduler in the middle of its work: so many requests decoding, so many waiting behind them."""

    def __init__(self, num_running: int, num_waiting: int = 0, policy: Policy = Policy.FCFS) -> None:
        blocks = num_running * ((_PROMPT + 16 * _STEPS) // _BLOCK_SIZE + 2)
        config = SchedulerConfig(
            max_num_seqs=num_running,
            max_num_batched_tokens=max(8192, num_running),
            max_queued_requests=num_waiting,
            max_queued_tokens=1 << 40,
            policy=policy,
        )
        self.scheduler = Scheduler(config, KVCacheManager(blocks, _BLOCK_SIZE), max_model_len=1 << 20)
        ids = count(1)
        self._add(ids, num_running)
        while len(self.scheduler.running) < num_running or self._prefilling():
            self.step()
        self._add(ids, num_waiting)
        self.step()

    def _add(self, ids: Iterator[int], number: int) -> None:
        for request_id in (next(ids) for _ in range(number)):
            prompt = [request_id % 1000, *range(_PROMPT - 1)]
            params = SamplingParams(max_tokens=16 * _STEPS)
            self.scheduler.add(
                AddRequest((request_id,), prompt, params, float(request_id), tenant=str(request_id % 10))
            )

    def _prefilling(self) -> bool:
        return any(r.num_tokens - r.num_computed_tokens > 1 for r in self.scheduler.running)

    def step(self) -> None:
        """One iteration; every request whose known tokens are all computed gets a new one."""
        scheduler = self.scheduler
        step = scheduler.schedule(1e9)
        decoding = [[7]] * len(step.request_ids)
        if len(step.request_ids) != step.total_num_scheduled_tokens:  # prompts: not in what is timed
            for index, request_id in enumerate(step.request_ids):
                request = scheduler.requests[request_id]
                computed = step.num_computed_tokens[index] + step.num_scheduled_tokens[index]
                decoding[index] = [7] if computed == request.num_tokens else []
        scheduler.update_from_output(step, ModelRunnerOutput(decoding), 1e9)

    def steps(self) -> None:
        for _ in range(_STEPS):
            self.step()


def measurements() -> Iterator[Measurement]:
    for num_running in (16, 64, 256):
        yield measure(f"scheduler step, {num_running} decoding", _STEPS, Stage(num_running).steps)
    for policy in Policy:
        stage = Stage(256, 10_000, policy)
        yield measure(f"scheduler step, 256 decoding, 10,000 waiting ({policy})", _STEPS, stage.steps)
