"""A replica as it was measured: the simulation finds again what it was made with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import Options, Target, WorkloadOptions
from penstock.loadtest.report.model import Report, Validity
from penstock.planning.calibrate import calibrate
from penstock.planning.engine import StepModel
from penstock.planning.least_squares import nonnegative
from penstock.planning.options import EngineOptions
from penstock.planning.report import Calibration
from support.planning import planned

TRUTH = StepModel(per_step=0.02, per_sequence=0.001, per_prefill_token=1e-4)
FLAGS: dict[str, Any] = {"sim_step_ms": 20.0, "sim_sequence_us": 1000.0, "sim_prefill_us": 100.0}


def load_test(folder: Path, gateway_ms: float, **load: float) -> str:
    """The report that a load test of such a replica would write; its prompts grow by 20 tokens on the way."""
    workload = {"requests": 16, "prompt_tokens": 150, "output_tokens": 12}
    replica = Calibration(step=TRUTH, gateway_ms=gateway_ms, template_tokens=20)
    simulation = planned(replica, **load, **workload)
    figures = simulation.figures()
    report = Report(
        **{name: getattr(figures, name) for name in figures.__struct_fields__},
        label="",
        date="",
        command="penstock loadtest",
        options=Options(
            target=Target(url="http://replica"),
            workload=msgspec.convert(workload, WorkloadOptions),
            load=simulation.options.load,
        ),
        validity=Validity(verdict="valid"),
        runs=[figures],
        tokens={"prompt_asked": 150.0, "prompt_counted": 170.0},
    )
    path = folder / f"{load}.json"
    path.write_bytes(msgspec.json.encode(report))
    return str(path)


def test_what_the_gateway_adds_comes_from_a_load_test(tmp_path: Path) -> None:
    found = calibrate(EngineOptions(measured=(load_test(tmp_path, 7.0, rate=3),), **FLAGS))
    assert found.step == TRUTH
    assert found.template_tokens == 20
    assert found.gateway_ms == pytest.approx(7.0, abs=0.2)
    assert all(ratio == pytest.approx(1, abs=0.01) for ratios in found.fit.values() for ratio in ratios)


def test_steps_are_fitted_to_load_tests(tmp_path: Path) -> None:
    """Of an engine of which nothing else is known."""
    reports = tuple(load_test(tmp_path, 5.0, concurrency=concurrency) for concurrency in (1, 8))
    found = calibrate(EngineOptions(measured=reports))
    assert found.step.per_step == pytest.approx(TRUTH.per_step, rel=0.05)
    assert found.step.per_sequence == pytest.approx(TRUTH.per_sequence, rel=0.2)
    assert all(ratio == pytest.approx(1, abs=0.1) for ratios in found.fit.values() for ratio in ratios)
    assert not found.notes
    alone = calibrate(EngineOptions(measured=reports[:1]))
    assert alone.step.per_sequence == 0
    assert "one load does not tell" in alone.notes[0]


def test_steps_come_from_a_bench_of_the_engine(tmp_path: Path) -> None:
    truth = StepModel(per_step=0.01, per_sequence=0.0002, per_prefill_token=8e-5, per_attended_token=2e-9)
    prompts = [
        {"tokens": tokens, "seconds": {"median": sum(_chunks(truth, tokens, 512))}} for tokens in (100, 512, 2048)
    ]
    decode = [
        {"batch_size": b, "context_length": c, "step_ms": {"median": 1e3 * truth.seconds(b, b, b * (c + 8))}}
        for b in (1, 8, 64)
        for c in (128, 4096)
    ]
    file = tmp_path / "bench.json"
    file.write_bytes(
        msgspec.json.encode({"chunk": 512, "decode_steps": 16, "prompts": prompts, "decode": decode, "model": "m"})
    )
    step = calibrate(EngineOptions(measured=(str(file),))).step
    for name in truth.__struct_fields__:
        assert getattr(step, name) == pytest.approx(getattr(truth, name), rel=0.02)


def _chunks(step: StepModel, tokens: int, chunk: int) -> list[float]:
    starts = range(0, tokens, chunk)
    sizes = [min(chunk, tokens - start) for start in starts]
    return [step.seconds(1, n, n * (start + n / 2)) for start, n in zip(starts, sizes, strict=True)]


def test_terms_are_never_negative() -> None:
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert nonnegative(matrix, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert nonnegative(matrix, np.array([3.0, 5.0, 7.0])) == pytest.approx([1.0, 2.0])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ('{"schema": "other"}', "is neither"),
        ('{"decode": []}', "missing required field"),
        ('{"decode": [], "schema": "penstock-bench-engine/2"}', "which another version has written"),
        ('{"schema": "penstock-loadtest/2"}', "which another version has written"),
    ],
)
def test_files_of_other_kinds_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(text)
    with pytest.raises(LoadTestError, match=words):
        calibrate(EngineOptions(measured=(str(file),)))


def test_something_must_say_how_fast_a_replica_is() -> None:
    with pytest.raises(LoadTestError, match="how fast is a replica"):
        calibrate(EngineOptions())
