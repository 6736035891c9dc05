"""Single runs of a row, and runs of the same load put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from penstock.loadtest.calibrate import Calibration
from penstock.loadtest.errors import INTERRUPTED
from penstock.loadtest.live import LiveView
from penstock.loadtest.messages import Sample
from penstock.loadtest.options import Options, Target
from penstock.loadtest.repeats import intervals, medians
from penstock.loadtest.report.histogram import histograms
from penstock.loadtest.report.model import Report, Validity
from penstock.loadtest.run import LoadTest

_WORST = ("valid", "doubtful", "invalid")
_FEWEST = 10
"""Complete requests below which the times of arrivals and ends say nothing about their rates."""
_SKIPPED = 10
"""One part in so many is left out at each end, where a run is still filling up or drying out."""
_LONG = 0.95
"""Quantile of the complete requests' times: one that was cut off before that may have been served as usual."""


class Run(NamedTuple):
    report: Report
    kept_up: float
    """See the function of that name."""


Runner = Callable[[Options, str], Run]
"""Runs a load test with these settings; the text says which one of the row it is. Raises LoadTestError when nothing
can be measured, KeyboardInterrupt when the user has ended it: what one run has measured until then is left out."""


BY_USER = "by the user"
"""What ended a row early, where no error did."""


class RealRunner:
    """With a live view of each run."""

    def __init__(self) -> None:
        self._calibrations: dict[Target, Calibration | None] = {}
        """What the client can do is measured once for each server."""

    def __call__(self, options: Options, text: str) -> Run:
        with LiveView(options) as view:
            view.note(text)
            test = LoadTest(options, view, calibration=self._calibrations.get(options.target))
            report = test.run_here()
        self._calibrations[options.target] = test.calibration
        if test.interrupted:
            raise KeyboardInterrupt
        counted = histograms(test.samples, open_loop=report.latency_from == "intended")
        return Run(replace(report, histograms=counted), kept_up(test.samples))


def kept_up(samples: Sequence[Sample]) -> float:
    """The rate at which requests were completed, as a share of the rate at which they came; 1: the server keeps up.

    Of the complete requests, without the first and the last tenth: the time over which they were due, divided by the
    time over which they ended. The same requests stand on both sides, so that what is random about arrivals cancels
    out. A server that completes only a part of the requests keeps up with at most that part. A request that was cut
    off counts among them only when it had already taken longer than most: where requests take longer than the grace
    period, the last ones of every run are cut off, however fast the server is.
    """
    good = [sample for sample in samples if not sample.error]
    times = sorted(sample.ended - sample.intended for sample in good)
    long = times[int(_LONG * (len(times) - 1))] if times else 0.0
    settled = sum(sample.error != INTERRUPTED or sample.ended - sample.intended > long for sample in samples)
    share = len(good) / settled if settled else 0.0
    if len(good) < _FEWEST:
        return share
    skipped = len(good) // _SKIPPED
    due, ended = (
        sorted(times)[skipped : len(good) - skipped]
        for times in ([sample.intended for sample in good], [sample.ended for sample in good])
    )
    came, done = due[-1] - due[0], ended[-1] - ended[0]
    return min(share, came / done) if done > 0 else share


def merge(reports: Sequence[Report], options: Options) -> Report:
    """Of runs of the same load, as if they were the repeats of one test with these settings."""
    last = reports[-1]
    runs = [run for report in reports for run in report.runs]
    return replace(
        last,
        **medians(runs),
        date=reports[0].date,
        options=replace(options, target=last.options.target),  # with the model's name, where the server told it
        runs=runs,
        intervals=intervals(runs),
        validity=_worst([report.validity for report in reports]),
    )


def _worst(verdicts: Sequence[Validity]) -> Validity:
    """The worst of them, with the reasons of all."""
    worst = max(verdicts, key=lambda validity: _WORST.index(validity.verdict))
    reasons = list(dict.fromkeys(reason for validity in verdicts for reason in validity.reasons))
    return replace(worst, reasons=reasons)


def of_round(options: Options, number: int) -> Options:
    """The settings of one repeat among others: a run by itself, with requests of its own."""
    load = replace(options.load, repeat=1)
    workload = replace(options.workload, seed=options.workload.seed + number)
    return replace(options, load=load, workload=workload)
