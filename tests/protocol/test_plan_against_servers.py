"""Plans beside real fleets: calibrated by a load test of one replica, they say what two and four will do.

It takes some minutes, and its figures are those of a machine that does nothing else:

    PENSTOCK_PLAN=1 pytest -s tests/protocol/test_plan_against_servers.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from penstock.loadtest.report.figures import value
from penstock.loadtest.report.file import read
from penstock.planning.main import plan
from penstock.planning.options import options
from support.server import serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif("PENSTOCK_PLAN" not in os.environ, reason="takes minutes: PENSTOCK_PLAN=1"),
]
STEPS = {"sim_step_ms": 400, "sim_prefill_us": 2000, "sim_sequence_us": 16000, "itl_target_ms": 2000}
"""A slow engine: what a request waits for a core of this machine is little beside that."""
WORKLOAD = {
    "prompt_tokens": 200,
    "prompt_tokens_stddev": 60,
    "output_tokens": 12,
    "output_tokens_stddev": 4,
    "duration": 90,
}
RATE = 0.3
"""For each replica."""
COMPARED = ("ttft_ms.p50", "ttft_ms.p95", "tpot_ms.p50", "tpot_ms.p95", "e2e_ms.p50", "e2e_ms.p95")


def flags(settings: dict[str, object]) -> list[str]:
    return [text for name, set_to in settings.items() for text in ("--" + name.replace("_", "-"), str(set_to))]


def measured(replicas: int, folder: Path) -> Path:
    """The report of a load test against so many replicas of the simulated engine."""
    report = folder / f"{replicas}.json"
    with serving("--engine", "simulated", "--replicas", str(replicas), *flags(STEPS)) as server:
        load = ["--url", server.url, "--rate", str(RATE * replicas), "--no-live", "--json", str(report)]
        # with a tokenizer each word is one token: plan and load test are about equal prompts
        load += ["--tokenizer", str(files("penstock.gateway") / "demo_model"), *flags(WORKLOAD)]
        subprocess.run([sys.executable, "-m", "penstock.gateway.cli", "loadtest", *load], check=True, timeout=200)
    return report


def test_a_plan_from_one_replica_says_what_two_and_four_do(tmp_path: Path) -> None:
    one = measured(1, tmp_path)
    for replicas in (2, 4):
        real = read(str(measured(replicas, tmp_path)))
        planned = plan(
            options({"measured": [str(one)], "replicas": replicas, "rate": RATE * replicas, **STEPS, **WORKLOAD})
        )
        assert planned.completed == real.completed
        print(f"\n{replicas} replicas, gateway {planned.calibration.gateway_ms:.1f} ms")
        ratios = {path: (value(planned, path) or 0) / (value(real, path) or 1) for path in COMPARED}
        for path, ratio in ratios.items():
            print(f"{path:12} measured {value(real, path):8.1f} planned {value(planned, path):8.1f} ratio {ratio:.3f}")
        assert all(abs(ratio - 1) < 0.1 for ratio in ratios.values())
