"""Micro benchmarks of a step's costs besides the model: `schedule` and `update_from_output`, with a runner that costs
nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.micro.benchmark import Benchmark, Work

if TYPE_CHECKING:
    from benchmarks.micro.suite.stage import Stage

STEPS = 200
"""That are timed at a time, on a fresh stage: caches of blocks and lists of tokens grow while requests run."""


def _decoding(num_running: int, num_waiting: int = 0, policy: str = "fcfs") -> Work:
    from benchmarks.micro.suite.stage import decoding

    return _steps(partial(decoding, num_running, num_waiting, policy, STEPS))


def _prefilling() -> Work:
    from benchmarks.micro.suite.stage import prefilling

    return _steps(partial(prefilling, STEPS))


def _storm() -> Work:
    from benchmarks.micro.suite.stage import storm

    return _steps(partial(storm, STEPS))


def _steps(make: Callable[[], Stage]) -> Work:
    stages: list[Stage] = []

    def renew() -> None:
        stages[:] = [make()]

    def run() -> None:
        step = stages[0].step
        for _ in range(STEPS):
            step()

    return Work(run, STEPS, renew)


BENCHMARKS = (
    *(Benchmark(f"scheduler/decode-{running}", "step", partial(_decoding, running)) for running in (16, 64, 256)),
    *(
        Benchmark(f"scheduler/decode-256-waiting-10k-{policy}", "step", partial(_decoding, 256, 10_000, policy))
        for policy in ("fcfs", "priority", "fair")
    ),
    Benchmark("scheduler/prefill-chunks", "step", _prefilling),
    Benchmark("scheduler/preemption-storm", "step", _storm),
)
