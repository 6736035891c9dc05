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
    wanted: set[str] = set()
    for pattern in patterns:
        found = {each.name for each in known if fnmatchcase(each.name, pattern) or each.group == pattern}
        if not found:
            groups = ", ".join(dict.fromkeys(each.group for each in known))
            raise LoadTestError(f"no benchmark is called {pattern!r}; the groups are {groups}")
        wanted |= found
    return [each for each in known if not patterns or each.name in wanted]
