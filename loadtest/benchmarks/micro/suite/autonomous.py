"""The admission queue in front of an engine with a scheduler of its own, over one that costs next to nothing."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from benchmarks.micro.benchmark import Benchmark, Work

if TYPE_CHECKING:
    from penstock.engines.autonomous.core import AutonomousCore
    from penstock.engines.contract.messages import AddRequest

_STEPS = 100


def _running(num_running: int, num_waiting: int = 0) -> Work:
    """A step of requests that all run on."""
    from benchmarks.micro.suite.instant import arrivals, queue

    cores: list[AutonomousCore] = []

    def renew() -> None:
        core = queue(num_running, num_waiting)
        core.step(islice(arrivals(2 * _STEPS), num_running))
        core.step(islice(arrivals(2 * _STEPS), num_running, num_running + num_waiting))
        if (core.stats().num_running, core.stats().num_waiting) != (num_running, num_waiting):
            raise RuntimeError("the queue is not as it should be")
        cores[:] = [core]

    def run() -> None:
        core = cores[0]
        for _ in range(_STEPS):
            core.step(())

    return Work(run, _STEPS, renew)


def _hand_over(number: int) -> Work:
    """From the message to the seat and out again: one request that wants one token."""
    from benchmarks.micro.suite.instant import arrivals, queue

    state: list[tuple[AutonomousCore, list[AddRequest]]] = []

    def renew() -> None:
        state[:] = [(queue(number), list(islice(arrivals(1), number)))]

    def run() -> None:
        core, requests = state[0]
        ended = core.step(requests).outputs
        if len(ended) != number:
            raise RuntimeError("not every request has ended")

    return Work(run, number, renew)


BENCHMARKS = (
    *(Benchmark(f"autonomous/step-{running}", "step", partial(_running, running)) for running in (16, 64, 256)),
    Benchmark("autonomous/step-256-waiting-10k", "step", partial(_running, 256, 10_000)),
    Benchmark("autonomous/hand-over", "request", partial(_hand_over, 256)),
)
