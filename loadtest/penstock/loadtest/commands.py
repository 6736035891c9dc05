"""The commands that this room adds to `penstock`. Nothing heavy is imported before one of them runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import SECTIONS

AddSections = Callable[..., None]
"""`penstock.gateway.flags.add_sections`: makes flags of sections of settings."""


def loadtest(commands: Any, add_sections: AddSections, formatter: type[argparse.HelpFormatter]) -> None:
    parser = commands.add_parser(
        "loadtest",
        help="measure a server",
        usage="penstock loadtest --url URL [options]",
        description="Sends load to a server that speaks the OpenAI API, KServe v2 or Triton's extensions, and says "
        "what it took, and whether the figures can be trusted.",
        argument_default=argparse.SUPPRESS,
        formatter_class=formatter,
    )
    parser.set_defaults(run=partial(_guarded, parser, _run))
    add_sections(parser, SECTIONS)
    others = parser.add_subparsers(metavar="COMMAND", title="instead of a run")
    _mock(others, add_sections, formatter)


def _mock(commands: Any, add_sections: AddSections, formatter: type[argparse.HelpFormatter]) -> None:
    from penstock.loadtest.mock.options import MockOptions

    parser = commands.add_parser(
        "mock",
        help="a server that answers at given times, to check load tests with",
        usage="penstock loadtest mock [options]",
        description="Serves the OpenAI API and generate_stream with answers at exactly given times, whatever the "
        "load. GET /truth says when it really wrote each token; DELETE /truth begins anew.",
        argument_default=argparse.SUPPRESS,
        formatter_class=formatter,
    )
    parser.set_defaults(run=partial(_guarded, parser, _run_mock))
    add_sections(parser, {"mock": MockOptions})


def _guarded(
    parser: argparse.ArgumentParser, command: Callable[[dict[str, Any]], int], settings: dict[str, Any]
) -> int:
    try:
        return command(settings)
    except LoadTestError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1


def _run(settings: dict[str, Any]) -> int:
    from penstock.loadtest.main import main

    return main(settings)


def _run_mock(settings: dict[str, Any]) -> int:
    from penstock.loadtest.mock.main import main

    return main(settings)
