"""The calibration of one replica: from flags, from measurements, or by fitting the simulation to load tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import log
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.metrics import Figures
from penstock.loadtest.report.figures import value
from penstock.loadtest.report.model import SCHEMA, Report
from penstock.loadtest.search.model import SweepReport
from penstock.planning.engine import StepModel
from penstock.planning.least_squares import minimize, nonnegative
from penstock.planning.options import EngineOptions, PlanOptions
from penstock.planning.report import Calibration
from penstock.planning.simulate import Simulation


class _Median(msgspec.Struct, frozen=True):
    median: float


class _PromptRow(msgspec.Struct, frozen=True):
    tokens: int
    seconds: _Median


class _DecodeRow(msgspec.Struct, frozen=True):
    batch_size: int
    context_length: int
    step_ms: _Median


class EngineBench(msgspec.Struct, frozen=True):
    """The part of `penstock bench engine --json` that says how long steps take."""

    chunk: int
    decode_steps: int
    prompts: list[_PromptRow]
    decode: list[_DecodeRow]


class Measured(msgspec.Struct, frozen=True):
    reports: list[Report]
    benches: list[EngineBench]


def read_measured(paths: Sequence[str]) -> Measured:
    """Raises LoadTestError, naming the file."""
    reports: list[Report] = []
    benches: list[EngineBench] = []
    for path in paths:
        measured = _read(path)
        if isinstance(measured, EngineBench):
            benches.append(measured)
        else:
            reports += measured
    for report in reports:
        if report.completed and not report.output_tokens:
            raise LoadTestError(f"measured: {report.command!r} got no tokens: {report.options.target.protocol}")
        if not report.completed or report.e2e_ms is None:
            raise LoadTestError(f"measured: no request of {report.command!r} was completed")
    return Measured(reports, benches)


def _read(path: str) -> EngineBench | list[Report]:
    try:
        data = Path(path).read_bytes()
        tree = msgspec.json.decode(data)
    except OSError as error:
        raise LoadTestError(f"measured: {path}: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LoadTestError(f"measured: {path}: not JSON: {error}") from None
    schema = tree.get("schema") if isinstance(tree, dict) else None
    try:
        if schema == SCHEMA:
            return [msgspec.convert(tree, Report)]
        if schema == "penstock-loadtest-sweep/1":
            return msgspec.convert(tree, SweepReport).reports
        if schema in (None, "penstock-bench-engine/1") and isinstance(tree, dict) and "decode" in tree:
            return msgspec.convert(tree, EngineBench)
    except msgspec.ValidationError as error:
        raise LoadTestError(f"measured: {path}: {error}") from None
    if isinstance(schema, str) and schema.startswith(("penstock-loadtest", "penstock-bench-engine/")):
        raise LoadTestError(f"measured: {path}: is of the schema {schema!r}, which another version has written")
    raise LoadTestError(
        f"measured: {path}: is neither a run nor a sweep of penstock loadtest --json, nor of penstock bench engine"
    )


_FITTED = ("ttft_ms.p50", "ttft_ms.p95", "tpot_ms.p50", "tpot_ms.p95", "e2e_ms.p50", "e2e_ms.p95")
_LATENCIES = tuple(path for path in _FITTED if not path.startswith("tpot"))
_GUESSES_MS = (0.0, *(2.0**power for power in range(-1, 9)))
_ROUNDS = 5
_LEAST = 1e-9
"""Seconds: a term that is fitted never gets to nothing."""

Vector = npt.NDArray[np.float64]


def calibrate(engine: EngineOptions) -> Calibration:
    """Raises LoadTestError when nothing says how long steps take, and for files that cannot be used."""
    measured = read_measured(engine.measured)
    notes: list[str] = []
    step, gateway_ms = _by_flags(engine), engine.gateway_ms
    if step is None and measured.benches:
        step = of_benches(measured.benches)
    template = _template_tokens(measured.reports) if engine.template_tokens is None else engine.template_tokens
    if step is None:
        if not measured.reports:
            raise LoadTestError(
                "measured: how fast is a replica? (--measured REPORT.json of penstock loadtest or penstock bench "
                "engine, or --sim-step-ms, --sim-prefill-us and --sim-sequence-us)"
            )
        step, gateway_ms = _fit(engine, measured.reports, template, notes)
    elif gateway_ms is None:
        gateway_ms = _gateway_ms(engine, step, measured.reports, template)
    calibration = Calibration(step=step, gateway_ms=gateway_ms, template_tokens=template, notes=notes)
    return replace(calibration, fit=_ratios(engine, calibration, measured.reports))


def _by_flags(engine: EngineOptions) -> StepModel | None:
    """By flags."""
    flags = (engine.sim_step_ms, engine.sim_prefill_us, engine.sim_sequence_us, engine.sim_attended_ns)
    if all(flag is None for flag in flags):
        return None
    step, prefill, sequence, attended = (flag or 0.0 for flag in flags)
    if not step and not prefill and not sequence:
        raise LoadTestError("sim-step-ms: steps that take no time leave nothing to plan")
    return StepModel(
        per_step=step / 1e3,
        per_prefill_token=prefill / 1e6,
        per_sequence=sequence / 1e6,
        per_attended_token=attended / 1e9,
    )


def of_benches(benches: Sequence[EngineBench]) -> StepModel:
    """Least squares of relative errors: steps, sequences, further tokens, and attended tokens, none below 0."""
    rows, seconds = [], []
    for bench in benches:
        for prompt in bench.prompts:
            steps = -(-prompt.tokens // bench.chunk)
            rows.append((steps, steps, prompt.tokens - steps, prompt.tokens**2 / 2))
            seconds.append(prompt.seconds.median)
        for decode in bench.decode:
            attended = decode.batch_size * (decode.context_length + bench.decode_steps / 2)
            rows.append((1, decode.batch_size, 0, attended))
            seconds.append(decode.step_ms.median / 1e3)
    measured = np.array(seconds)
    per_step, per_sequence, per_prefill, per_attended = nonnegative(
        np.array(rows, np.float64) / measured[:, None], np.ones(len(rows))
    )
    return StepModel(
        per_step=per_step,
        per_sequence=per_sequence,
        per_prefill_token=per_prefill,
        per_attended_token=per_attended,
    )


def _template_tokens(reports: Sequence[Report]) -> int:
    """By which the server counted more than was asked for."""
    added = [r.tokens["prompt_counted"] - r.tokens["prompt_asked"] for r in reports if r.tokens.get("prompt_counted")]
    return max(0, round(fmean(added))) if added else 0


def _simulated(engine: EngineOptions, calibration: Calibration, report: Report) -> Figures:
    """What a fleet of one such replica does under the report's load."""
    workload = replace(report.options.workload, token_ids=False)
    if not workload.dataset:
        workload = replace(workload, tokenizer=None)
    simulation = Simulation(PlanOptions(engine=engine, workload=workload, load=report.options.load), calibration)
    simulation.run()
    return simulation.figures()


def _gateway_ms(engine: EngineOptions, step: StepModel, reports: Sequence[Report], template: int) -> float:
    """The time with which simulated requests take as long as the measured ones. Not just the difference: where clients
    wait for answers, when they send decides which step takes a request in. Halving and doubling, then between."""
    errors: dict[float, float] = {}

    def error(gateway_ms: float) -> float:
        if gateway_ms not in errors:
            calibration = Calibration(step=step, gateway_ms=gateway_ms, template_tokens=template)
            ratios = _ratios(engine, calibration, reports)
            errors[gateway_ms] = sum(log(ratio) ** 2 for path in _LATENCIES for ratio in ratios.get(path, ()))
        return errors[gateway_ms]

    if not reports:
        return 0.0
    best = min(_GUESSES_MS, key=error)
    for _ in range(_ROUNDS):
        tried = sorted(errors)
        place = tried.index(best)
        around = tried[max(0, place - 1) : place + 2]
        best = min([best, *((low + high) / 2 for low, high in pairwise(around))], key=error)
    return best


def _fit(engine: EngineOptions, reports: Sequence[Report], template: int, notes: list[str]) -> tuple[StepModel, float]:
    """Searches the terms with which the simulation gives the measured figures. Logarithms, so that all stay above 0."""
    least = min(reports, key=lambda report: value(report, "tpot_ms.p50") or np.inf)
    tpot, ttft = value(least, "tpot_ms.p50"), value(least, "ttft_ms.p50")
    if tpot is None or ttft is None:
        raise LoadTestError("measured: times of steps can be told from streams of several tokens only")
    prompt = max(1.0, least.prompt_tokens / max(1, least.completed))
    levels = {(r.options.load.concurrency, r.options.load.rate, r.options.workload.trace) for r in reports}
    start = [tpot / 1e3, max(ttft - 1.5 * tpot, 0.1 * ttft) / 1e3 / prompt, engine.gateway_ms or 1.0]
    if len(levels) > 1:
        start.append(0.02 * tpot / 1e3)
    else:
        notes.append(
            "one load does not tell how steps grow with the requests in them: fit to a sweep "
            "(penstock loadtest --sweep concurrency=1:32:x2), or give --sim-sequence-us"
        )

    def of_terms(logs: Vector) -> Calibration:
        per_step, prefill, gateway, *sequence = (max(_LEAST, float(x)) for x in np.exp(logs))
        step = StepModel(per_step=per_step, per_prefill_token=prefill, per_sequence=sequence[0] if sequence else 0.0)
        gateway_ms = gateway if engine.gateway_ms is None else engine.gateway_ms
        return Calibration(step=step, gateway_ms=gateway_ms, template_tokens=template)

    def errors(logs: Vector) -> Vector:
        ratios = _ratios(engine, of_terms(logs), reports)
        return np.array([log(ratio) for path in _FITTED for ratio in ratios.get(path, ())])

    best = of_terms(minimize(errors, np.log(np.array(start))))
    return best.step, best.gateway_ms


def _ratios(engine: EngineOptions, calibration: Calibration, reports: Sequence[Report]) -> dict[str, list[float]]:
    """Measured / simulated."""
    simulated = [_simulated(engine, calibration, report) for report in reports]
    ratios: dict[str, list[float]] = {}
    for path in _FITTED:
        pairs = [(value(real, path), value(ours, path)) for real, ours in zip(reports, simulated, strict=True)]
        rows = [real / ours for real, ours in pairs if real and ours]
        if rows:
            ratios[path] = rows
    return ratios
