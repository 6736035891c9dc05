"""The command that this package adds to `penstock`. Nothing is imported, and no flag is made, before it is used."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from penstock.loadtest.commands import AddSections, run_module


def plan(commands: Any, add_sections: AddSections, formatter: type[argparse.HelpFormatter]) -> None:
    def fill(parser: argparse.ArgumentParser) -> None:
        from penstock.planning.options import SECTIONS, SETTINGS

        add_sections(parser, SECTIONS, only=SETTINGS)

    parser = commands.add_parser(
        "plan",
        help="simulate a fleet of replicas",
        usage="penstock plan --measured REPORT.json --replicas N [options]",
        description="Simulates replicas behind the gateway under a load test's workload, in virtual time: latencies, "
        "throughput, costs, the replicas that an SLO needs, autoscaling and failures.",
        argument_default=argparse.SUPPRESS,
        formatter_class=formatter,
        fill=fill,
    )
    parser.set_defaults(run_command=partial(run_module, parser, "penstock.planning.main"))
