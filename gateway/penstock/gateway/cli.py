"""The command line. `penstock serve` stands here; other commands come as entry points of the group `penstock.commands`.

Flags are derived from the structs of settings (`penstock.gateway.flags`); nothing else happens here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

from penstock.gateway.config import LISTS, OTHER_NAMES, SECTIONS, Config, ConfigError, load_config
from penstock.gateway.flags import add_sections, switches
from penstock.gateway.triton_flags import TRITON_REFUSED


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["serve"]:
        given = _without_triton_forms(parser, given)
    args = vars(parser.parse_args(given))
    run: Callable[[dict[str, Any]], int] = args.pop("run_command")
    return run(args)


def _configured(parser: argparse.ArgumentParser, settings: dict[str, Any]) -> int:
    file = settings.pop("config", None)
    try:
        config = load_config(settings, file=file)
    except ConfigError as error:
        parser.error(str(error))
    return _serve(config)


def _serve(config: Config) -> int:
    # Engine processes are started by fork and exec; gRPC's fork handlers only cost there, and complain. It reads this
    # when it is first imported.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from penstock.gateway.lifecycle import serve  # only now: --help stays quick

    return serve(config)


def _without_triton_forms(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Triton writes switches as --name=true and --name=false; for argparse they are --name and --no-name."""
    known = switches(SECTIONS)
    plain = []
    for arg in argv:
        flag, equals, value = arg.partition("=")
        if flag in TRITON_REFUSED:
            parser.error(f"{flag} is a flag of Triton's that this server does not have: {TRITON_REFUSED[flag]}")
        state = _STATES.get(value.lower()) if equals else None
        if state is None or flag.removeprefix("--").replace("-", "_") not in known:
            plain.append(arg)
        else:
            plain.append(flag if state else "--no-" + flag.removeprefix("--"))
    return plain


_STATES = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Serves language models with continuous batching, and Triton model repositories beside them, over "
        "the OpenAI API and KServe v2.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {version('penstock')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    formatter = partial(argparse.HelpFormatter, max_help_position=34, width=110)
    serve = commands.add_parser(
        "serve",
        help="serve a model",
        usage="penstock serve [MODEL] [options]",
        description="Serves MODEL and the models of --model-repository; without either, the built-in demo model.",
        epilog="Each setting can also stand in the file given by --config (TOML or YAML), or in a variable named "
        "PENSTOCK_ and the flag's name in capitals, as in PENSTOCK_HTTP_PORT. Flags win over variables, those over "
        "the file.",
        argument_default=argparse.SUPPRESS,
        formatter_class=formatter,
    )
    serve.set_defaults(run_command=partial(_configured, serve))
    serve.add_argument("--config", type=Path, metavar="FILE", help="read settings from this TOML or YAML file")
    add_sections(serve, SECTIONS, positional="model", lists=LISTS, other_names=OTHER_NAMES)
    for command in entry_points(group="penstock.commands"):
        command.load()(commands, add_sections, formatter)
    return parser


if __name__ == "__main__":
    sys.exit(main())
