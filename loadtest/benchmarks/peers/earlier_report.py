"""An earlier report, whose figures stay: a part of the tables can be measured again without the hour for all."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.peers.plan import plan
from benchmarks.peers.results import SCHEMA, GroupResult, PeersReport
from benchmarks.peers.settings import WEIGHTS, PeersSettings
from penstock.loadtest.errors import LoadTestError

_MACHINE = ("cpu", "cores", "os", "python")
"""Of the environment: what figures of one report have in common."""


def read_report(path: str) -> PeersReport:
    """What `--json` wrote. Raises LoadTestError, naming the file."""
    try:
        report = msgspec.json.decode(Path(path).read_bytes(), type=PeersReport)
    except OSError as error:
        raise LoadTestError(f"keep: {path}: {error.strerror or error}") from None
    except msgspec.MsgspecError as error:
        raise LoadTestError(f"keep: {path}: not a report of peers: {error}") from None
    if report.schema != SCHEMA:
        raise LoadTestError(f"keep: {path} is of the schema {report.schema!r}, not {SCHEMA!r}")
    return report


def check_comparable(report: PeersReport, earlier: PeersReport) -> None:
    """Raises LoadTestError where the two cannot stand in one report: another machine, other versions."""
    for name in _MACHINE:
        here, there = report.environment.get(name), earlier.environment.get(name)
        if here != there:
            raise LoadTestError(f"keep: the earlier report is of another machine: {name} was {there}, and is {here}")
    for name, packages in report.versions.items():
        there = earlier.versions.get(name, packages)
        if there != packages:
            raise LoadTestError(f"keep: the earlier report has other versions: of {name} {there} instead of {packages}")


def keep_earlier(report: PeersReport, earlier: PeersReport) -> None:
    """Adds the groups that have not been measured now, all in the order of the plan."""
    measured = {_key(group) for group in report.groups}
    kept = [group for group in earlier.groups if _key(group) not in measured]
    everything = plan(PeersSettings(dir=report.settings.dir, weights=WEIGHTS))
    names = [(group.table, group.model, group.weights, group.peer) for group in everything]
    order = {name: position for position, name in enumerate(names)}
    report.groups = sorted([*report.groups, *kept], key=lambda group: order.get(_key(group), len(order)))
    report.versions = earlier.versions | report.versions
    left_out = {name: why for name, why in earlier.skipped.items() if name not in report.versions}
    report.skipped = left_out | report.skipped
    cut = earlier.groups[-1:] if earlier.interrupted else []
    report.interrupted = report.interrupted or any(group in kept for group in cut)


def _key(group: GroupResult) -> tuple[str, str, str, str]:
    return group.table, group.model, group.weights, next(iter(group.titles))
