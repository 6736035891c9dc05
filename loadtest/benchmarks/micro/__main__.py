"""`python -m benchmarks.micro [NAME ...]`: what stands between a request and its tokens, timed by pyperf.

pyperf runs each benchmark in several processes of its own, and has the options: `--fast`, `-o FILE`, `--list`, and so
on. `python -m pyperf compare_to OLD NEW` says what differs by more than noise.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from time import perf_counter

import pyperf

from benchmarks.micro.benchmark import Work
from benchmarks.micro.catalogue import benchmarks, select
from penstock.loadtest.errors import LoadTestError


def main() -> None:
    runner = pyperf.Runner(program_args=("-P", "-m", "benchmarks.micro"), add_cmdline_args=_names)
    runner.argparser.add_argument("names", nargs="*", metavar="NAME", help="a group or a pattern, as 'blocks/*'; all")
    runner.argparser.add_argument("--list", action="store_true", help="only list the names")
    options = runner.parse_args()
    try:
        chosen = select(options.names, benchmarks().values())
    except LoadTestError as error:
        sys.exit(str(error))
    if options.list:
        print("\n".join(f"{benchmark.name} (one {benchmark.operation})" for benchmark in chosen))
        return
    for task, benchmark in enumerate(chosen):
        is_here = options.worker and options.worker_task == task  # all others are timed in other processes
        work = benchmark.setup() if is_here else Work(lambda: None)
        metadata = {"operation": benchmark.operation}
        runner.bench_time_func(benchmark.name, _timed(work), inner_loops=work.operations, metadata=metadata)


def _names(command: list[str], options: Namespace) -> None:
    command.extend(options.names)


def _timed(work: Work) -> Callable[[int], float]:
    """The seconds that so many calls take."""

    def seconds(calls: int) -> float:
        if work.renew is not None:
            return sum(_once(work.run, work.renew) for _ in range(calls))
        run, repeat = work.run, range(calls)
        started = perf_counter()
        for _ in repeat:
            run()
        return perf_counter() - started

    return seconds


def _once(run: Callable[[], object], renew: Callable[[], object]) -> float:
    renew()
    started = perf_counter()
    run()
    return perf_counter() - started


if __name__ == "__main__":
    main()
