"""`penstock loadtest`: runs, shows, writes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from penstock.loadtest.live import LiveView
from penstock.loadtest.options import Options, options
from penstock.loadtest.report.model import Report
from penstock.loadtest.report.write import write
from penstock.loadtest.run import LoadTest

UNTRUSTED, FAILED = 3, 4
"""Exit statuses of `--strict`."""


def main(settings: Mapping[str, Any]) -> int:
    """Returns the exit status. Raises LoadTestError when nothing can be measured."""
    chosen = options(settings)
    with LiveView(chosen) as view:
        test = LoadTest(chosen, view)
        report = asyncio.run(test.run())
    write(report, test.samples, chosen.output)
    return status(report, chosen)


def status(report: Report, chosen: Options) -> int:
    """0, unless `--strict` finds that the figures cannot be trusted or that requests failed."""
    if report.validity.verdict == "invalid":
        print("the figures are not valid: " + "; ".join(report.validity.reasons), file=sys.stderr)
    if not chosen.output.strict:
        return 0
    if report.validity.verdict == "invalid":
        return UNTRUSTED
    return FAILED if report.failed else 0
