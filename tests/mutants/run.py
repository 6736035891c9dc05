"""Do the tests notice? Puts the bugs of mutants.toml into a copy of the sources, one at a time, and runs tests on it.

    python tests/mutants/run.py [--seconds N] [NAME ...]

Says by which test each was noticed ("killed"): it fails with the bug, and passes without it. The exit status is 1 if
one survived or could not be tried, or if there was no time for any.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from importlib.util import cache_from_source
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_SOURCES = ("gateway", "engines", "kvcache", "tokenizers", "loadtest")
_OTHERS = ("tests", "pyproject.toml", "README.md", "LICENSE")
_PYTEST = ("-x", "-q", "--show-capture=no", "-p", "mutants.as_found")
_TIMEOUT = 600.0
"""Seconds for the tests of one mutant: tests have limits of their own, so this is for what hangs outside of them."""
_LINES = 40
"""Shown of the tests' output where a mutant could not be tried."""
_PASSED, _FAILED = 0, 1
"""What pytest returns."""


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def applied(self, source: str) -> str:
        """Raises ValueError unless the place is unmistakable."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has its text {source.count(self.old)} times, not once")
        return source.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """All of them, in the file's order."""
    entries = tomllib.loads((ROOT / "tests/mutants/mutants.toml").read_text())["mutant"]
    return [Mutant(**entry) for entry in entries]


def main(names: Sequence[str], seconds: float) -> int:
    """`seconds`: after so many no other one is begun; then they are tried in a new order each time."""
    known = {mutant.name: mutant for mutant in mutants()}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no such mutant: {', '.join(unknown)}")
    chosen = [known[name] for name in names] or list(known.values())
    end = time.monotonic() + seconds
    if math.isfinite(seconds):
        random.shuffle(chosen)
    outcomes: list[bool] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        _copy_to(copy)
        for mutant in chosen:
            began = time.monotonic()
            if began > end:
                break
            killed, what = _try(copy, mutant)
            outcomes.append(killed)
            print(f"{mutant.name}: {what} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{sum(outcomes)} of {len(outcomes)} mutants killed, no time for {len(chosen) - len(outcomes)}")
    return 0 if outcomes and all(outcomes) else 1


def _copy_to(folder: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    for name in (*_SOURCES, *_OTHERS):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)


def _try(copy: Path, mutant: Mutant) -> tuple[bool, str]:
    """Whether it was killed, and how."""
    path = copy / mutant.file
    source = path.read_text()
    _write(path, mutant.applied(source))
    try:
        done = _run_tests(copy, mutant.tests)
    except subprocess.TimeoutExpired:
        return True, f"killed, the tests did not end within {_TIMEOUT:.0f} s"
    finally:
        _write(path, source)
    if done.returncode == _PASSED:
        return False, "SURVIVED"
    if done.returncode != _FAILED:
        return False, f"NOT TRIED: {_end(done)}"
    without = _run_tests(copy, mutant.tests, "--last-failed")
    if without.returncode != _PASSED:
        return False, f"NOT TRIED: without it the test fails as well\n{_end(without)}"
    return True, f"killed by {_failure(done)}"


def _write(path: Path, source: str) -> None:
    """Python tells by size and second whether what it has compiled is up to date, so that goes."""
    path.write_text(source)
    Path(cache_from_source(path)).unlink(missing_ok=True)


def _run_tests(copy: Path, tests: Sequence[str], *options: str) -> subprocess.CompletedProcess[str]:
    paths = [str(copy / name) for name in (*_SOURCES, "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "EVERY_FAMILY": "1"}
    command = [sys.executable, "-m", "pytest", *_PYTEST, *options, *(f"tests/{test}" for test in tests)]
    return subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=_TIMEOUT, check=False
    )


def _failure(done: subprocess.CompletedProcess[str]) -> str:
    """The first test that failed."""
    test = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return test[1] if test else "no test"


def _end(done: subprocess.CompletedProcess[str]) -> str:
    """The last lines of what pytest wrote, without what was logged: the assertion is among them."""
    return "\n".join([*done.stdout.splitlines(), *done.stderr.splitlines()][-_LINES:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*", help="mutants to try; all of them if none is named")
    parser.add_argument("--seconds", type=float, default=math.inf, help="try as many as this is enough for, at random")
    arguments = parser.parse_args()
    sys.exit(main(arguments.names, arguments.seconds))
