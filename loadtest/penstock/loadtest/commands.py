"""The commands that this room adds to `penstock`. Nothing heavy is imported before one of them runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from penstock.loadtest.errors import LoadTestError, UsageError
from penstock.loadtest.options import SECTIONS

_LONGEST = 4000
"""Of what is told of an error: servers' words may be in it."""
AddSections = Callable[..., None]
"""`penstock.gateway.configuration.flags.add_sections`: makes flags of sections of settings.

`commands`, whose parsers take `fill` and `hints` besides argparse's options, make a CommandParser of
`penstock.gateway.configuration.command_parser`."""
_OTHER_FLAGS = {
    **dict.fromkeys(("--base-url", "-u", "--host", "--port"), "use --url"),
    "-m": "use --model",
    **dict.fromkeys(("--num-prompts", "--num-requests", "--request-count", "-n"), "use --requests"),
    **dict.fromkeys(("--request-rate", "--request-rate-range"), "use --rate, or --sweep rate=1:32:x2 for several"),
    **dict.fromkeys(("--max-concurrency", "-c"), "use --concurrency"),
    "--concurrency-range": "use --sweep concurrency=1,4,16",
    **dict.fromkeys(("--random-input-len", "--input-len", "--synthetic-input-tokens-mean"), "use --prompt-tokens"),
    **dict.fromkeys(("--random-output-len", "--output-len", "--output-tokens-mean"), "use --output-tokens"),
    **dict.fromkeys(("--dataset-name", "--dataset-path", "--input-file"), "use --dataset FILE"),
    **dict.fromkeys(("--backend", "--endpoint-type", "--endpoint", "-i"), "use --protocol"),
    **dict.fromkeys(("--save-result", "--result-filename", "--export-json"), "use --json FILE"),
    **dict.fromkeys(("--num-warmups", "--warmup-request-count"), "use --warmup"),
    "--measurement-interval": "use --duration",
}
"""Flags of vllm bench, perf_analyzer, GenAI-Perf and AIPerf, and what to use here."""


def loadtest(commands: Any, add_sections: AddSections, formatter: type[argparse.HelpFormatter]) -> None:
    parser = commands.add_parser(
        "loadtest",
        help="measure a server",
        usage="penstock loadtest --url URL [options]",
        description="Sends load to a server that speaks the OpenAI API, KServe v2 or Triton's extensions, and says "
        "what it took, and whether the figures can be trusted.",
        argument_default=argparse.SUPPRESS,
        formatter_class=formatter,
        hints=_OTHER_FLAGS,
    )
    parser.set_defaults(run_command=partial(run_module, parser, "penstock.loadtest.main"))
    add_sections(parser, SECTIONS)
    subcommands = parser.add_subparsers(metavar="COMMAND", title="instead of a run", prog=parser.prog)
    _mock(subcommands, add_sections, formatter)
    subcommands.add_parser(
        "compare",
        help="differences between reports, and whether they are chance",
        description="Compares reports of load tests.",
        formatter_class=formatter,
        fill=_add_compare_flags,
    )


def _add_compare_flags(parser: argparse.ArgumentParser) -> None:
    from penstock.loadtest.compare import add_flags

    add_flags(parser)


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

        text = _as_flag(parser, clean(str(error), longest=_LONGEST))
        if isinstance(error, UsageError):
            parser.error(text)
        print(f"{parser.prog}: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while it is imported: what runs has its own way to end
        print(f"{parser.prog}: stopped", file=sys.stderr)
        return 130


def _as_flag(parser: argparse.ArgumentParser, text: str) -> str:
    """Errors begin with the setting that they are about, by its name: at the command line it is a flag."""
    name = text.partition(":")[0]
    return f"--{text}" if f"--{name}" in parser._option_string_actions else text
