"""Results in a file, in the layout of pytest-benchmark (its version 5): tools that compare such files read it."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.micro.measure import LEAST_ROUNDS
from benchmarks.micro.stats import Stats
from penstock.loadtest.environment import environment
from penstock.loadtest.errors import LoadTestError


class ExtraInfo(msgspec.Struct, omit_defaults=True):
    operation: str = ""
    """What an iteration is."""
    instructions: float | None = None
    """For one iteration, as callgrind counts them."""
    others: float = 0.0
    """Share of the machine's processors that other processes used meanwhile."""


class Result(msgspec.Struct):
    group: str | None
    name: str
    fullname: str
    stats: Stats
    params: dict[str, Any] | None = None
    param: str | None = None
    extra_info: ExtraInfo = msgspec.field(default_factory=ExtraInfo)
    options: dict[str, Any] = {}


class ResultFile(msgspec.Struct):
    machine_info: dict[str, Any]
    benchmarks: list[Result]
    datetime: str
    version: str
    commit_info: dict[str, Any] = {}


def result(name: str, extra_info: ExtraInfo, stats: Stats, seconds: float) -> Result:
    options = {
        "disable_gc": True,
        "timer": "perf_counter",
        "min_rounds": LEAST_ROUNDS,
        "min_time": seconds,
        "max_time": seconds,
        "warmup": True,
    }
    group = name.partition("/")[0]
    return Result(group, name, f"penstock/{name}", stats, None, None, extra_info, options)


def write(path: Path, results: Sequence[Result], started: datetime) -> None:
    """Raises LoadTestError when it cannot be written."""
    found = environment()
    machine = {
        "node": "",
        "processor": platform.processor(),
        "machine": platform.machine(),
        "python_implementation": platform.python_implementation(),
        "python_version": found["python"],
        "python_compiler": platform.python_compiler(),
        "python_build": list(platform.python_build()),
        "release": platform.release(),
        "system": platform.system(),
        "cpu": {"brand_raw": found["cpu"], "count": found["cores"]},
        "packages": found["packages"],
    }
    file = ResultFile(machine, list(results), started.astimezone(UTC).isoformat(), "5.2.3")
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")
    except OSError as error:
        raise LoadTestError(f"{path} cannot be written: {error.strerror}") from None


def read(path: Path) -> dict[str, Result]:
    """By name. Raises LoadTestError for what is no file of this layout."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=ResultFile)
    except OSError as error:
        raise LoadTestError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LoadTestError(f"{path} holds no results of benchmarks: {error}") from None
    return {each.name: each for each in file.benchmarks}
