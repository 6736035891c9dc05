"""One benchmark in a process of its own: `python -P -m benchmarks.micro.child NAME SECONDS|count`.

So its figures do not depend on what ran before it: not on memory that others left behind, not on how the interpreter
has specialised the code that they share. The answer is one line of JSON on stdout.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from benchmarks.micro.benchmark import Benchmark
from benchmarks.micro.callgrind import count
from benchmarks.micro.catalogue import benchmarks
from benchmarks.micro.measure import measure
from benchmarks.micro.stats import Stats, summary

COUNT = "count"


class Answer(msgspec.Struct):
    skipped: str | None = None
    """Why it cannot run here."""
    stats: Stats | None = None
    counted: int = 0
    """Operations that callgrind has counted the instructions of."""


def answer(benchmark: Benchmark, how: str) -> Answer:
    """`how`: the seconds to measure it for, or COUNT."""
    try:
        work = benchmark.setup()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("penstock", "benchmarks"):
            raise
        return Answer(skipped=f"needs the package {error.name}")
    if how == COUNT:
        return Answer(counted=count(work))
    return Answer(stats=summary(measure(work, float(how))))


def main(name: str, how: str) -> None:
    out = os.dup(1)
    os.dup2(2, 1)  # whatever libraries print is not the answer
    found = answer(benchmarks()[name], how)
    os.write(out, msgspec.json.encode(found))
    # What was set up is not taken down: threads and sockets that wait for nothing would only cost time here.
    os._exit(0)


if __name__ == "__main__":
    arguments: list[Any] = sys.argv[1:]
    main(*arguments)
