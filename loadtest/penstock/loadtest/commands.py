"""The commands that this room adds to `penstock`. Nothing heavy is imported before one of them runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import SECTIONS

_LONGEST = 4000
"""Of what is told of an error: servers' words may be in it."""
AddSections = Callable[..., None]
"""`penstock.gateway.configuration.flags.add_sections`: makes flags of sections of settings."""


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
    parser.set_defaults(run_command=partial(run_module, parser, "penstock.loadtest.main"))
    add_sections(parser, SECTIONS)
    others = parser.add_subparsers(
        metavar="COMMAND", title="instead of a run", parser_class=_MayPassOn, prog=parser.prog
    )
    _mock(others, add_sections, formatter)
    others.add_parser("compare", help="what differs between reports, and whether it is chance").passed_to = _compare


class _MayPassOn(argparse.ArgumentParser):
    """A parser of a command that has one of its own, which costs too much to import before it is asked for."""

    passed_to: Callable[[Sequence[str]], int] | None = None

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if self.passed_to is None:
            return super().parse_known_args(args, namespace)
        command, rest = self.passed_to, list(args or ())
        return argparse.Namespace(run_command=lambda _: command(rest)), []


def _compare(argv: Sequence[str]) -> int:
    from penstock.loadtest.compare import main

    return main(argv)


def _mock(commands: Any, add_sections: AddSections, formatter: type[argparse.HelpFormatter]) -> None:
    from penstock.loadtest.mock.options import MockOptions

    parser = commands.add_parser(
        "mock",
        help="a server that answers at given times, to check load tests with",
        usage="penstock loadtest mock [options]",
        description="Serves the OpenAI API and generate_stream with answers at exactly given times, whatever the "
        "load. GET /truth says when it really wrote each token; DELETE /truth forgets all of that.",
        argument_default=argparse.SUPPRESS,
        formatter_class=formatter,
    )
    parser.set_defaults(run_command=partial(run_module, parser, "penstock.loadtest.mock.main"))
    add_sections(parser, {"mock": MockOptions})


def tune(commands: Any, add_sections: AddSections, formatter: type[argparse.HelpFormatter]) -> None:
    from penstock.loadtest.tune.options import SECTIONS as TUNE_SECTIONS

    parser = commands.add_parser(
        "tune",
        help="find a server's best options",
        usage="penstock tune --param NAME=VALUE,VALUE ... [options] -- serve [MODEL] [options of the server]",
        description="Starts a server with each combination of options, sends it the same load (30 s, unless --requests "
        "or --duration say otherwise), stops it, and says which options did best. The server's command comes last: "
        "that of penstock, or with --url that of any other server.",
        argument_default=argparse.SUPPRESS,
        formatter_class=formatter,
    )
    parser.set_defaults(run_command=partial(run_module, parser, "penstock.loadtest.tune.main"))
    add_sections(parser, TUNE_SECTIONS)
    parser.add_argument("server", nargs="*", metavar="COMMAND", help="that starts the server, after --")


def run_module(parser: argparse.ArgumentParser, module: str, settings: dict[str, Any]) -> int:
    """Runs `main` of the module, which is imported only now."""
    try:
        return int(import_module(module).main(settings))
    except LoadTestError as error:
        from penstock.loadtest.report.formatting import clean

        print(f"{parser.prog}: {clean(str(error), longest=_LONGEST)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while it is imported: what runs has its own way to end
        print(f"{parser.prog}: stopped", file=sys.stderr)
        return 130
