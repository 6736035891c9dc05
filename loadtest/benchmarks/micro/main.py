"""`python loadtest/benchmarks micro`: measures, shows, writes, compares."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.micro import isolate
from benchmarks.micro.benchmark import Benchmark
from benchmarks.micro.callgrind import valgrind
from benchmarks.micro.catalogue import benchmarks, select
from benchmarks.micro.compare import BUSY
from benchmarks.micro.results import ExtraInfo, Result, read, result, write
from benchmarks.micro.table import comparison, table
from penstock.loadtest.environment import busy_cpu_seconds
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import OutputOptions
from penstock.loadtest.report.formatting import percent, plural
from penstock.loadtest.report.write import check_files

_LONGEST = 300
"""Seconds of `--min-time`: what is renewed before each round takes several times as long."""


def main(settings: Mapping[str, Any]) -> int:
    """Returns the exit status: 1 when a benchmark failed or the run was interrupted. Raises LoadTestError for what
    cannot be done at all."""
    chosen = select(settings["names"], benchmarks().values())
    if settings["list"]:
        print("\n".join(f"{each.name} (one {each.operation})" for each in chosen))
        return 0
    if not 0 <= settings["min_time"] <= _LONGEST:
        raise LoadTestError(f"--min-time must be between 0 and {_LONGEST} seconds")
    if settings["callgrind"]:
        valgrind()
    check_files(OutputOptions(json=settings["json"]))
    earlier = None if settings["compare"] is None else read(Path(settings["compare"]))
    started = datetime.now(UTC)
    results, failed = _measured(chosen, settings["min_time"], callgrind=settings["callgrind"])
    if results:
        print(table(results))
    if earlier is not None:
        print(f"\n{comparison(results, earlier)}")
    busy = [each.extra_info.others for each in results if each.extra_info.others > BUSY]
    if busy:
        which, share = plural(len(busy), "benchmark"), percent(max(busy))
        text = f"Other processes used up to {share} of the machine while {which} ran: these times are noisy."
        print(f"\n{text}", file=sys.stderr)
    if settings["json"] is not None:
        write(Path(settings["json"]), results, started)
    return int(failed)


def _measured(chosen: Sequence[Benchmark], seconds: float, *, callgrind: bool) -> tuple[list[Result], bool]:
    """(results, whether some failed). One after the other: two at a time would disturb each other."""
    results: list[Result] = []
    failed = False
    for number, benchmark in enumerate(chosen, 1):
        name = benchmark.name
        print(f"[{number}/{len(chosen)}] {name}", file=sys.stderr, flush=True)
        others = _Others()
        try:
            found = isolate.timed(name, seconds)
            share = others.share()
            instructions = isolate.counted(name)[1] if callgrind and found.stats is not None else None
        except LoadTestError as error:
            print(error, file=sys.stderr)
            failed = True
            continue
        except KeyboardInterrupt:
            print("interrupted: the rest is left out", file=sys.stderr)
            return results, True
        if found.stats is None:
            print(f"{name} is skipped: it {found.skipped}", file=sys.stderr)
        else:
            results.append(result(name, ExtraInfo(benchmark.operation, instructions, share), found.stats, seconds))
    return results, failed


class _Others:
    """What the rest of the machine does while we measure."""

    def __init__(self) -> None:
        self._started = perf_counter()
        self._others = self._cpu_seconds()

    def share(self) -> float:
        """Of all processors."""
        elapsed = (perf_counter() - self._started) * (os.cpu_count() or 1)
        return max(0.0, self._cpu_seconds() - self._others) / elapsed

    def _cpu_seconds(self) -> float:
        ours = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return busy_cpu_seconds() - sum(usage.ru_utime + usage.ru_stime for usage in ours)
