"""`penstock loadtest`: runs, shows, writes."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.live import LiveView
from penstock.loadtest.options import Options, OutputOptions, options
from penstock.loadtest.report.formatting import clean
from penstock.loadtest.report.markdown import summary
from penstock.loadtest.report.model import Report
from penstock.loadtest.report.write import check_files, write
from penstock.loadtest.run import LoadTest
from penstock.loadtest.search.find import run_find
from penstock.loadtest.search.findings import comparison_findings, search_findings, sweep_findings
from penstock.loadtest.search.model import FindReport
from penstock.loadtest.search.runs import BY_USER, RealRunner
from penstock.loadtest.search.study import AnyStudy, Findings, Study, check_output, write_study
from penstock.loadtest.search.sweep import run_sweep
from penstock.loadtest.search.versus import DEFAULT_REPEATS, run_versus

CANNOT, UNTRUSTED, FAILED, STOPPED = 1, 3, 4, 130
"""Exit statuses: something could not be measured; of `--strict`: figures cannot be trusted, requests failed; the user
has ended it, and there is a report of what was measured until then."""
_ROWS = ("sweep", "find", "vs")
_BELONG = {"slo": "find", "precision": "find", "max_runs": "find"} | {
    f"vs_{name}": "vs" for name in ("model", "label", "extra", "api_key")
}
"""Settings that mean something only beside another one."""


def main(settings: Mapping[str, Any]) -> int:
    """Returns the exit status. Raises LoadTestError when nothing can be measured."""
    row = _row(settings)
    try:
        if row is None:
            return _run(options(settings))
        defaults = {"repeat": DEFAULT_REPEATS} if row == "vs" else {}
        return _run_row(row, options(defaults | dict(settings)))
    except KeyboardInterrupt:
        print("penstock loadtest: ended before anything was measured", file=sys.stderr)
        return STOPPED


def _row(settings: Mapping[str, Any]) -> str | None:
    """Which row of runs is asked for; None: a single one."""
    chosen = [name for name in _ROWS if settings.get(name) is not None]
    if len(chosen) > 1:
        raise LoadTestError(f"{' and '.join(chosen)}: one of them at a time")
    for name, other in _BELONG.items():
        if name in settings and other not in chosen:
            raise LoadTestError(f"{name.replace('_', '-')}: means something only with --{other}")
    return chosen[0] if chosen else None


def _run(chosen: Options) -> int:
    check_files(chosen.output)
    with LiveView(chosen) as view:
        test = LoadTest(chosen, view)
        report = test.run_here()
    with _ignoring_ctrl_c():
        report = write(report, test.samples, chosen.output)
        if not _takes_stdout(chosen.output):
            print(summary(report))
    if report.interrupted_by_user:
        return STOPPED
    return status([report], chosen) or (0 if report.completed else CANNOT)


@contextmanager
def _ignoring_ctrl_c() -> Iterator[None]:
    """Who presses it once more when the run has just ended would lose the report. Has no effect but in the main
    thread, which alone gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _run_row(row: str, chosen: Options) -> int:
    check_output(chosen.output)
    runner = RealRunner()
    if row == "sweep":
        study: Study = write_row(run_sweep(chosen, runner), sweep_findings, chosen.output)
    elif row == "find":
        study = write_row(run_find(chosen, runner), search_findings, chosen.output)
    else:
        study = write_row(run_versus(chosen, runner), comparison_findings, chosen.output)
    if study.ended_early:
        return ended(study)
    # what a search was looking for lies between a load that holds and one that fails
    judged = [r for r in study.reports if not isinstance(study, FindReport) or _load(study, r) == study.held]
    some = all if row == "vs" else any
    return status(judged, chosen) or (0 if some(report.completed for report in study.reports) else CANNOT)


def write_row(study: AnyStudy, describe: Callable[[AnyStudy], Findings], output: OutputOptions) -> AnyStudy:
    with _ignoring_ctrl_c():
        return write_study(study, describe, output)


def ended(study: Study) -> int:
    """The exit status of one that was ended early."""
    print(f"ended early: {clean(study.ended_early)}", file=sys.stderr)
    return STOPPED if study.ended_early == BY_USER else CANNOT


def _load(study: FindReport, report: Report) -> float | None:
    return report.options.load.concurrency if study.searched == "concurrency" else report.options.load.rate


def _takes_stdout(output: OutputOptions) -> bool:
    """Whether something else is written there."""
    return "-" in (output.json, output.markdown, output.csv, output.html, output.vllm_json, output.aiperf_json)


def status(reports: Sequence[Report], chosen: Options) -> int:
    """0, unless `--strict` finds that the figures cannot be trusted or that requests failed."""
    invalid = [report for report in reports if report.validity.verdict == "invalid"]
    for report in invalid:
        print("the figures are not valid: " + "; ".join(report.validity.reasons), file=sys.stderr)
    if not chosen.output.strict:
        return 0
    if invalid:
        return UNTRUSTED
    return FAILED if any(report.failed for report in reports) else 0
