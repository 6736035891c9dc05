"""Drives a runner step by step, with requests that have all the blocks that they will need from the beginning.

There is no scheduler: what a step holds is what is to be measured. As many steps are under way as in a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.runner import ModelRunner
from penstock.engines.contract.step import NewRequest, SchedulerOutput


@dataclass(slots=True)
class _Request:
    id: int
    block_ids: list[list[int]]
    """For each of the groups of layers."""
    num_computed: int = 0


def blocks_for(info: ModelInfo, num_tokens: int) -> int:
    """That one request has here: also those behind a window, which a server takes back."""
    return sum(-(-num_tokens // group.block_size) for group in info.kv_groups)


class StepDriver:
    """Its requests live until `drop_all`."""

    def __init__(self, runner: ModelRunner, chunk: int, clock: Callable[[], float]) -> None:
        """`chunk`: most tokens of a step."""
        self._runner = runner
        self._chunk = chunk
        self._clock = clock
        self._blank = list(range(runner.info.num_blocks - 1, -1, -1))
        self._live: list[_Request] = []
        self._dropped: list[int] = []
        """Of which the next step tells the runner."""
        self._next_id = 0

    def begin(self, prompt: Sequence[int], room: int) -> float:
        """Computes a prompt alone and samples the first of at most `room` tokens. Returns the seconds."""
        groups, length = self._runner.info.kv_groups, len(prompt) + room
        blocks = [[self._blank.pop() for _ in range(-(-length // group.block_size))] for group in groups]
        request = _Request(self._next_id, blocks)
        self._next_id += 1
        self._live.append(request)
        started = self._clock()
        return self._run(self._prompt_steps(request, prompt, room))[-1] - started

    def decode(self, num_steps: int) -> list[float]:
        """Each request gets one more token in each step. Returns when the steps ended."""
        return self._run(self._decode_step() for _ in range(num_steps))

    def drop_all(self) -> None:
        for request in self._live:
            self._dropped.append(request.id)
            for ids in request.block_ids:
                self._blank += reversed(ids)
        self._live = []

    def _prompt_steps(self, request: _Request, prompt: Sequence[int], room: int) -> Iterator[SchedulerOutput]:
        params = SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True)
        while request.num_computed < len(prompt):
            count = min(self._chunk, len(prompt) - request.num_computed)
            step = self._step([request], count)
            if request.num_computed == 0:
                tables = tuple(list(ids) for ids in request.block_ids)
                step.new_requests = [NewRequest(request.id, list(prompt), len(prompt), tables, params, seed=0)]
            request.num_computed += count
            yield step

    def _decode_step(self) -> SchedulerOutput:
        step = self._step(self._live, 1)
        for request in self._live:
            request.num_computed += 1
        return step

    def _step(self, requests: Sequence[_Request], count: int) -> SchedulerOutput:
        dropped, self._dropped = self._dropped, []
        return SchedulerOutput(
            request_ids=[request.id for request in requests],
            num_scheduled_tokens=[count] * len(requests),
            num_computed_tokens=[request.num_computed for request in requests],
            dropped_ids=dropped,
            total_num_scheduled_tokens=count * len(requests),
        )

    def _run(self, steps: Iterable[SchedulerOutput]) -> list[float]:
        """Raises what the runner says of a request that failed."""
        ends: list[float] = []
        under_way = 0
        for step in steps:
            self._runner.submit(step)
            under_way += 1
            if under_way == self._runner.max_steps_in_flight:
                ends.append(self._collect())
                under_way -= 1
        return ends + [self._collect() for _ in range(under_way)]

    def _collect(self) -> float:
        output = self._runner.collect()
        for error in output.failed.values():
            raise error
        return self._clock()
