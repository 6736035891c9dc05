"""The command line of the benchmarks. Nothing heavy is imported before one of them runs."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks import COMMAND
from benchmarks.peers.settings import LISTS, PeersSettings
from penstock.gateway.configuration.flags import add_sections
from penstock.loadtest.commands import run_module

_FORMATTER: Any = partial(argparse.HelpFormatter, max_help_position=34, width=110)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=shlex.join(COMMAND), description="Measures Penstock, and others beside it.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _peers(commands)
    _continuous(commands)
    _embeddings(commands)
    _batches(commands)
    _schemas(commands)
    _grammars(commands)
    _handover(commands)
    _figures(commands)
    _architectures(commands)
    settings = vars(parser.parse_args(argv))
    run: Callable[[dict[str, Any]], int] = settings.pop("run_command")
    return run(settings)


def _peers(commands: Any) -> None:
    parser = _command(
        commands,
        "peers",
        help="Penstock beside other servers on this machine, as tables",
        usage="%(prog)s --dir DIR [options]",
        description="Sets up, starts and measures vLLM, llama.cpp, OpenVINO GenAI, transformers, Triton, MLServer, "
        "KServe's SDK and LitServe beside Penstock, in turns and on the same models, and writes tables with ratios.",
        argument_default=argparse.SUPPRESS,
    )
    add_sections(parser, {"peers": PeersSettings}, lists=LISTS)


def _continuous(commands: Any) -> None:
    parser = _command(
        commands,
        "continuous",
        help="what continuous batching is worth beside static batches",
        usage="%(prog)s [MODEL] [options]",
        description="Computes 64 requests that want 8 to 256 tokens once with the scheduler and once in batches of 16 "
        "that wait for their longest answer, with the same runner.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model folder; default: the demo model")
    parser.add_argument("--lengths", choices=("even", "log"), default="even", help="how the lengths spread (even)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs; figures are medians (3)")


def _embeddings(commands: Any) -> None:
    parser = _command(
        commands,
        "embeddings",
        help="embeddings beside sentence-transformers and other servers",
        usage="%(prog)s MODEL --peer-python PYTHON [options]",
        description="Serves an embedding model and asks for texts of 16 to 512 tokens, 1 to 64 at a time, in turns "
        "with sentence-transformers.",
    )
    parser.add_argument("model", metavar="MODEL", help="the folder of an embedding model for 512 tokens")
    parser.add_argument("--peer-python", required=True, metavar="PYTHON", help="one that has sentence-transformers")
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        nargs=3,
        metavar=("NAME", "URL", "MODEL"),
        help="a running server with OpenAI's embeddings at this address (several may be given)",
    )
    parser.add_argument("--seconds", type=float, default=1.5, metavar="S", help="of each run (1.5)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs; figures are medians (3)")


def _batches(commands: Any) -> None:
    parser = _command(
        commands,
        "batches",
        help="a batch through kill -9, and chats beside it",
        usage="%(prog)s [MODEL] [options]",
        description="Runs a batch, kills the server in the middle and starts it again. Counts the results, and times "
        "the first tokens of chats alone and beside the batch.",
    )
    parser.add_argument("model", nargs="*", metavar="MODEL", help="a model folder; default: the demo model")
    parser.add_argument("--lines", type=int, default=5000, metavar="N", help="of the batch (5000)")


def _schemas(commands: Any) -> None:
    parser = _command(
        commands,
        "schemas",
        help="which JSON schemas servers take, and whether their answers fit",
        usage="%(prog)s SUITE --server NAME=URL [options]",
        description="Sends the schemas of JSON-Schema-Test-Suite to servers that run, and checks their answers. Needs "
        "the package jsonschema, whose source distribution has the suite in its folder json.",
    )
    parser.add_argument("suite", metavar="SUITE", help="the suite's folder, with tests and remotes")
    parser.add_argument("--server", required=True, action="append", metavar="NAME=URL", help="may be given again")
    parser.add_argument("--model", default="m", metavar="NAME", help="by which the servers know the model (m)")
    parser.add_argument("--draft", default="draft2020-12", metavar="NAME", help="folder of tests (draft2020-12)")
    parser.add_argument("--answers", type=int, default=8, metavar="N", help="to each schema (8)")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="of an answer (200)")
    parser.add_argument("--concurrency", type=int, default=16, metavar="N", help="answers in flight (16)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="of a request (120)")
    parser.add_argument("--json", metavar="FILE", help="write all figures and wrong answers there")


def _handover(commands: Any) -> None:
    parser = _command(
        commands,
        "handover",
        help="when it pays that one replica computes prompts for another one",
        usage="%(prog)s [MODEL] [options]",
        description="Lets long prompts come while streams generate: with one engine, with two replicas, and with two "
        "of which one computes the prompts.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model folder; default: the demo model")
    parser.add_argument("--prompt", type=int, default=1024, metavar="N", help="tokens of a long prompt (1024)")
    parser.add_argument("--prompts", type=int, default=8, metavar="N", help="of them in a run (8)")
    parser.add_argument("--streams", type=int, default=4, metavar="N", help="that generate meanwhile (4)")
    parser.add_argument("--weights", default="auto", metavar="TYPE", help="as of penstock serve (auto)")
    parser.add_argument("--simulated", action="store_true", help="engines that sleep in place of computing")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs; figures are medians (3)")


def _grammars(commands: Any) -> None:
    parser = _command(
        commands,
        "grammars",
        help="what structured output costs in each step",
        usage="%(prog)s [MODEL] [options]",
        description="Times steps of requests that have grammars beside steps of requests that have none, in turns.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model folder; default: the demo model")
    kinds = ("schema", "any JSON", "letters", "no braces")
    parser.add_argument("--grammars", nargs="+", default=kinds, choices=kinds, metavar="NAME", help="of them (all)")
    parser.add_argument("--in-flight", type=int, default=64, metavar="N", help="requests in each step (64)")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="to time in a run (100)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs; figures are medians (3)")


def _figures(commands: Any) -> None:
    parser = _command(
        commands,
        "figures",
        help="measures the README's rows, writes docs/performance.md and names the figures that are old",
        usage="%(prog)s [--check | --measure ROW ... --dir DIR]",
        description="Writes the pages of figures from loadtest/benchmarks/figures/figures.toml. Prints which tables "
        "are older than the code that they measure, by git's dates. With --measure it measures rows of the README "
        "first, with the peers that `peers --setup` has set up in --dir.",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page would change")
    parser.add_argument(
        "--measure", nargs="+", default=(), metavar="ROW", help="as docs/figures.md names them: genai, llamacpp ..."
    )
    parser.add_argument("--dir", metavar="DIR", help="the folder of the peers")


def _architectures(commands: Any) -> None:
    parser = _command(
        commands,
        "architectures",
        help="writes docs/architectures.md: which engine serves which causal language model of transformers",
        usage="%(prog)s [--check] [--probe]",
        description="Writes the table of architectures. What OpenVINO serves are the families that are registered; "
        "what torch serves was tried on tiny models, and is kept in architectures.toml.",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if the page would change")
    parser.add_argument("--probe", action="store_true", help="try all of them on torch again (some minutes)")


def _command(commands: Any, name: str, **described: Any) -> argparse.ArgumentParser:
    """A command that is run by `main` of `benchmarks.NAME.main`, with its settings."""
    parser: argparse.ArgumentParser = commands.add_parser(name, formatter_class=_FORMATTER, **described)
    parser.set_defaults(run_command=partial(run_module, parser, f"benchmarks.{name}.main"))
    return parser
