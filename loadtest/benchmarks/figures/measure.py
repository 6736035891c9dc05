"""The README's rows, measured beside their peers: `python loadtest/benchmarks figures --measure ROW --dir FOLDER`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.peers.main import measure
from benchmarks.peers.notes import case_name
from benchmarks.peers.results import PeersReport
from benchmarks.peers.settings import settings
from benchmarks.peers.short_table import INVALID
from benchmarks.peers.tables import group_parts
from penstock.gateway.commands.doctor.machine_checks import cpu_class, memory_speed
from penstock.loadtest.errors import LoadTestError

MEASURED = Path(__file__).with_name("measured.json")


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One row on one class of CPU, as it was measured last."""

    date: str
    """ISO 8601."""
    machine: str
    versions: str
    method: str
    figure: str
    body: tuple[str, ...]
    """Lines of Markdown."""


Results = dict[str, dict[str, Measured]]
"""By the row's name and the class of the CPU."""


class ReadmeRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    """By which `--measure` knows it."""
    title: str
    text: str = ""
    """In the README's table; a row without stands on the page alone."""
    code: tuple[str, ...]
    """Names of `paths`: what is measured."""
    method: str
    peers: dict[str, Any]
    """Settings of `python loadtest/benchmarks peers`."""
    table: str
    contender: str
    """The form of Penstock whose ratio to the peer is shown."""
    cases: tuple[str, ...]
    """Those of the table whose ratios are shown, by name."""


def measured(path: Path = MEASURED) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)


def measure_row(row: ReadmeRow, folder: str) -> Measured:
    """Raises LoadTestError where a ratio is missing in the end."""
    speed = memory_speed()
    report = measure(settings({"dir": folder, **row.peers}))
    if report.interrupted:
        raise LoadTestError(f"{row.name}: ended early: its figures stay as they were")
    about = report.environment
    return Measured(
        date=datetime.now(UTC).date().isoformat(),
        machine=f"{about['cpu']}, {about['cores']} cores, {cpu_class()}, memory read at {speed / 1e9:.1f} GB/s",
        versions=", ".join(_versions(report)),
        method=row.method,
        figure=" / ".join(_ratios(row, report)),
        body=tuple("\n\n".join(part for group in report.groups for part in group_parts(group)).splitlines()),
    )


def _ratios(row: ReadmeRow, report: PeersReport) -> Iterator[str]:
    results = {
        case_name(result.case): result for group in report.groups if group.table == row.table for result in group.cases
    }
    for name in row.cases:
        ratio = results[name].ratios().get(row.contender) if name in results else None
        if ratio is None:
            raise LoadTestError(f"{row.name}: {name}: no ratio of {row.contender}, for the reason above")
        peer = next(iter(results[name].cells))
        invalid = any(results[name].cells[server].invalid for server in (peer, row.contender))
        yield f"{ratio.ratio:.2f}{f' {INVALID}' if invalid else ''}"


def _versions(report: PeersReport) -> Iterator[str]:
    for name, packages in report.versions.items():
        yield from (f"{package} {version}" for package, version in packages.items() if name != "penstock")


def keep(name: str, result: Measured, path: Path = MEASURED) -> None:
    """As this CPU's; those of other classes, and other rows, stay."""
    results = measured(path)
    results[name] = results.get(name, {}) | {cpu_class(): result}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
