"""All benchmarks, by name. Importing this imports nothing of what they time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from benchmarks.micro.benchmark import Benchmark
from benchmarks.micro.suite import (
    autonomous,
    batching,
    blocks,
    chat,
    detokenizing,
    ipc,
    kserve_grpc,
    kserve_http,
    mailbox,
    requests,
    sampling,
    scheduling,
    sse,
    stopping,
)
from penstock.loadtest.errors import LoadTestError

MODULES = (
    scheduling,
    autonomous,
    blocks,
    sampling,
    detokenizing,
    stopping,
    sse,
    chat,
    requests,
    ipc,
    mailbox,
    kserve_http,
    kserve_grpc,
    batching,
)


def benchmarks() -> dict[str, Benchmark]:
    return {benchmark.name: benchmark for module in MODULES for benchmark in module.BENCHMARKS}


def select(patterns: Sequence[str], known: Iterable[Benchmark]) -> list[Benchmark]:
    """Those that a pattern (of fnmatch) names, or whose group it is; all of them without any. In the order of `known`,
    each once. Raises LoadTestError for a pattern that names none."""
    known = list(known)
    names: set[str] = set()
    for pattern in patterns:
        matches = {case.name for case in known if fnmatchcase(case.name, pattern) or case.group == pattern}
        if not matches:
            groups = ", ".join(dict.fromkeys(case.group for case in known))
            raise LoadTestError(f"no benchmark is called {pattern!r}; the groups are {groups}")
        names |= matches
    return [case for case in known if not patterns or case.name in names]
