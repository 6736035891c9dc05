"""The program around OpenVINO GenAI, with another one in its peers_folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers.in_process import InProcess
from benchmarks.peers.plan import Case
from benchmarks.peers.process import Process
from benchmarks.peers.settings import settings
from penstock.loadtest.errors import LoadTestError

PROGRAM = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    tokens = job["output_tokens"]
    if len(job["prompts"][0].split()) != 7: sys.exit("prompts of another length")
    requests = [{"sent": 0.0, "ended": 3.0, "arrivals": [[1.0, 1], [3.0, tokens - 1]]} for _ in job["prompts"]]
    print(json.dumps({"seconds": 4.0, "requests": requests}), flush=True)
"""
CASE = Case(table="generation", model="qwen05b-shape", protocol="openai-completions", concurrency=32)
SETTINGS = settings({"dir": "d", "prompt_tokens": 7, "output_tokens": 5, "waves": 3})


def start(tmp_path: Path, code: str) -> Process:
    return Process([sys.executable, "-c", code], tmp_path / "log", pipes=True)


def test_its_figures_are_made_as_those_of_servers(tmp_path: Path) -> None:
    with start(tmp_path, PROGRAM) as process:
        program = InProcess(process, "", 30)
        assert program.try_out(CASE, SETTINGS, 2) == 10
        run = program.measure(CASE, SETTINGS, 0)
    figures = run.figures
    assert (figures.completed, figures.output_tokens, figures.output_tokens_per_s) == (96, 480, 160.0)
    assert figures.ttft_ms is not None
    assert figures.tpot_ms is not None
    assert (figures.ttft_ms.p50, figures.tpot_ms.p50) == (1000.0, 500.0), "the gap of 2 s is that of 4 tokens"


@pytest.mark.parametrize(
    ("code", "said"),
    [("raise SystemExit('no model')", r"it has ended\n(.*\n)*.*no model"), ("input()", r"no answer within 0\.2 s")],
)
def test_a_program_that_does_not_come_up(tmp_path: Path, code: str, said: str) -> None:
    with start(tmp_path, code) as process, pytest.raises(LoadTestError, match=said):
        InProcess(process, "", 20 if "no model" in code else 0.2)


def test_a_program_that_ends_in_a_run(tmp_path: Path) -> None:
    code = "print('ready', flush=True); input(); raise SystemExit('out of memory')"
    with start(tmp_path, code) as process:
        program = InProcess(process, "", 30)
        with pytest.raises(LoadTestError, match="out of memory"):
            program.measure(CASE, SETTINGS, 0)
        with pytest.raises(LoadTestError, match="it has ended"):
            program.measure(CASE, SETTINGS, 0)
