"""Starts a process for each benchmark, always in the same way."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

import benchmarks
from benchmarks.micro import callgrind
from benchmarks.micro.child import COUNT, Answer
from penstock.loadtest.errors import LoadTestError

_MODULE = "benchmarks.micro.child"
_ROOT = str(Path(benchmarks.__file__).parents[1])
"""Where children look for that module first."""
_LONGEST = 1800.0
"""Seconds; a child that takes longer hangs."""
_FIXED = {
    "PYTHONHASHSEED": "0",  # else sets and dicts are laid out differently in every process
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR")


def timed(name: str, seconds: float) -> Answer:
    """Raises LoadTestError when the benchmark fails."""
    return _run(_program(name, repr(seconds)), name)


def counted(name: str) -> tuple[Answer, float]:
    """(answer, instructions for one operation; 0 for one that was skipped). Raises LoadTestError when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        answer = _run(callgrind.command(_program(name, COUNT), out), name)
        return answer, callgrind.total(out) / answer.counted if answer.counted else 0.0


def _program(name: str, how: str) -> list[str]:
    return [sys.executable, "-P", "-m", _MODULE, name, how]


def _run(program: list[str], name: str) -> Answer:
    environment = {key: os.environ[key] for key in _PASSED_ON if key in os.environ} | _FIXED
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, environment.get("PYTHONPATH"))))
    try:
        done = subprocess.run(program, capture_output=True, env=environment, timeout=_LONGEST, check=False)
    except subprocess.TimeoutExpired:
        raise LoadTestError(f"{name} has not ended within {_LONGEST:.0f} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        raise LoadTestError(f"{name} failed: {lines[-1]}")
    return msgspec.json.decode(done.stdout, type=Answer)
