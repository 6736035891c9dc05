"""The command that this package adds to `penstock`. Nothing is imported, and no flag is made, before it is used."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from penstock.loadtest.commands import AddSections, run_module


def plan(commands: Any, add_sections: AddSections, formatter: type[argparse.HelpFormatter]) -> None:
    parser = commands.add_parser(
        "plan",
        help="simulate a fleet of replicas",
        usage="penstock plan --measured REPORT.json --replicas N [options]",
        description="Simulates replicas behind the gateway under a load test's workload, in virtual time: latencies, "
        "throughput, costs, the replicas that an SLO needs, autoscaling and failures.",
        argument_default=argparse.SUPPRESS,
        formatter_class=formatter,
    )
    parser.set_defaults(run_command=partial(run_module, parser, "penstock.planning.main"))
    parse = parser.parse_known_args

    def parse_known_args(
        args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if parser.parse_known_args is not parse:
            from penstock.planning.options import SECTIONS, SETTINGS

            parser.parse_known_args = parse
            add_sections(parser, SECTIONS, only=SETTINGS)
        found: tuple[argparse.Namespace, list[str]] = parse(args, namespace)
        return found

    parser.parse_known_args = parse_known_args
