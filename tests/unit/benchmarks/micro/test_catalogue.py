"""Every benchmark can be set up and run, and is found by its name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.micro import catalogue
from benchmarks.micro.catalogue import benchmarks, select
from penstock.loadtest.errors import LoadTestError

ALL = benchmarks()


@pytest.mark.parametrize("name", ALL)
def test_it_runs_and_its_figures_are_of_operations(name: str) -> None:
    work = ALL[name].setup()
    for _ in range(2):
        if work.renew is not None:
            work.renew()
        work.run()
    assert work.operations >= 1
    assert ALL[name].operation


def test_names_are_unique_and_of_groups() -> None:
    names = [each.name for module in catalogue.MODULES for each in module.BENCHMARKS]
    assert len(names) == len(set(names))
    assert all(name.count("/") == 1 for name in names)


def names(*patterns: str) -> list[str]:
    return [each.name for each in select(patterns, ALL.values())]


def test_without_patterns_all_are_chosen() -> None:
    assert names() == list(ALL)


def test_groups_and_patterns_choose_each_once_in_order() -> None:
    assert names("stop/none-begins", "blocks/hash") == ["blocks/hash", "stop/none-begins"]
    assert names("scheduler/decode-??", "scheduler/decode-16") == ["scheduler/decode-16", "scheduler/decode-64"]
    group = names("blocks", "blocks/*")
    assert group == [name for name in ALL if name.startswith("blocks/")]


def test_a_pattern_without_a_benchmark_is_an_error() -> None:
    with pytest.raises(LoadTestError, match="no benchmark is called 'block'; the groups are scheduler, autonomous"):
        names("blocks", "block")


def test_listing_imports_nothing_of_what_is_timed() -> None:
    code = (
        "import sys, benchmarks.micro.catalogue;"
        "heavy = {'penstock.engines', 'penstock.gateway', 'penstock.tokenizers', 'penstock.kvcache', 'numpy', 'zmq'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_pyperf_times_what_is_named(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    command = [sys.executable, "-P", "-m", "benchmarks.micro", "blocks/hash", "--debug-single-value", "-o", str(file)]
    subprocess.run(command, capture_output=True, timeout=60, check=True)
    [timed] = json.loads(file.read_bytes())["benchmarks"]
    assert timed["runs"][0]["values"][0] > 0


def test_a_name_that_no_benchmark_has_ends_the_command() -> None:
    command = [sys.executable, "-P", "-m", "benchmarks.micro", "block"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("no benchmark is called 'block'")
