"""What was measured of one replica: reports of load tests, and of `penstock bench engine`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.report.model import SCHEMA, Report
from penstock.loadtest.search.model import SweepReport


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
        found = _read(path)
        if isinstance(found, EngineBench):
            benches.append(found)
        else:
            reports += found
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
        if schema is None and isinstance(tree, dict) and "decode" in tree:
            return msgspec.convert(tree, EngineBench)
    except msgspec.ValidationError as error:
        raise LoadTestError(f"measured: {path}: {error}") from None
    raise LoadTestError(
        f"measured: {path}: is neither a run nor a sweep of penstock loadtest --json, nor of penstock bench engine"
    )
