"""The command line: `penstock serve`. Flags are derived from the configuration tree; nothing else happens here."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from penstock.gateway.config import LISTS, PAIRS, SECTIONS, TRITON_NAMES, Config, ConfigError, load_config
from penstock.gateway.triton_flags import TRITON_REFUSED


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    plain = _plain_flags(sys.argv[1:] if argv is None else argv)
    for flag in (arg.partition("=")[0] for arg in plain):
        if flag in TRITON_REFUSED:
            parser.error(f"{flag} is a flag of Triton's that this server does not have: {TRITON_REFUSED[flag]}")
    args = vars(parser.parse_args(plain))
    args.pop("command")
    file = args.pop("config", None)
    try:
        config = load_config(args, file=file)
    except ConfigError as error:
        parser.error(str(error))
    return _serve(config)


def _serve(config: Config) -> int:
    # Engine processes are started by fork and exec; gRPC's fork handlers only cost there, and complain. It reads this
    # when it is first imported.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from penstock.gateway.lifecycle import serve  # only now: --help stays quick

    return serve(config)


def _plain_flags(argv: Sequence[str]) -> list[str]:
    """Triton writes switches as --name=true and --name=false; for argparse they are --name and --no-name."""
    plain = []
    for arg in argv:
        flag, equals, value = arg.partition("=")
        state = _SWITCHES.get(value.lower()) if equals else None
        if state is None or flag.removeprefix("--").replace("-", "_") not in _BOOLEANS:
            plain.append(arg)
        else:
            plain.append(flag if state else "--no-" + flag.removeprefix("--"))
    return plain


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Serves language models with continuous batching, and Triton model repositories beside them, over "
        "the OpenAI API and KServe v2.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {version('penstock')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model",
        usage="penstock serve [MODEL] [options]",
        description="Serves MODEL and the models of --model-repository; without either, the demo model that comes "
        "along.",
        epilog="Each setting can also stand in the file given by --config (TOML or YAML), or in a variable named "
        "PENSTOCK_ and the flag's name in capitals, as in PENSTOCK_HTTP_PORT. Flags win over variables, those over "
        "the file.",
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    serve.add_argument("--config", type=Path, metavar="FILE", help="read settings from this TOML or YAML file")
    for name, section in SECTIONS.items():
        _add_section(serve, name, section)
    return parser


def _add_section(parser: argparse.ArgumentParser, name: str, section: type[msgspec.Struct]) -> None:
    group = parser.add_argument_group(name, (section.__doc__ or "").strip())
    for field in _fields(section):
        _add_flag(group, field, _bare(field.type))


def _add_flag(group: Any, field: inspect.Field, kind: inspect.Type) -> None:
    names = [field.name, *(name for name, ours in TRITON_NAMES.items() if ours == field.name)]
    flags = ["--" + name.replace("_", "-") for name in names]
    options: dict[str, Any] = {"help": _help(field)}
    if field.name == "model":
        group.add_argument("model", nargs="?", metavar="MODEL", **options)
    elif isinstance(kind, inspect.BoolType):
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
    elif isinstance(kind, inspect.LiteralType):
        group.add_argument(*flags, choices=kind.values, **options)
    elif field.name in LISTS:
        group.add_argument(*flags, action="extend", type=lambda text: text.split(","), metavar="NAME[,NAME]", **options)
    elif field.name in PAIRS:
        group.add_argument(*flags, action="append", metavar="TEXT", **options)
    else:
        group.add_argument(*flags, metavar=_metavar(kind), **options)


def _is_switch(field: inspect.Field) -> bool:
    return isinstance(_bare(field.type), inspect.BoolType)


def _bare(kind: inspect.Type) -> inspect.Type:
    """Without bounds and descriptions."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    return kind


def _fields(section: type[msgspec.Struct]) -> Sequence[inspect.Field]:
    info = inspect.type_info(section)
    if not isinstance(info, inspect.StructType):
        raise TypeError(f"{section} is not a struct")
    return info.fields


_SWITCHES = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
_BOOLEANS = {field.name for section in SECTIONS.values() for field in _fields(section) if _is_switch(field)}


def _help(field: inspect.Field) -> str:
    text = (
        (field.type.extra_json_schema or {}).get("description", "") if isinstance(field.type, inspect.Metadata) else ""
    )
    silent = field.default in (None, (), "")
    return text if silent or isinstance(field.default, bool) else f"{text} (default: {field.default})"


def _metavar(kind: inspect.Type) -> str:
    names = {inspect.IntType: "N", inspect.FloatType: "X"}
    if isinstance(kind, inspect.UnionType):
        kind = _bare(next(member for member in kind.types if not isinstance(member, inspect.NoneType)))
    return names.get(type(kind), "TEXT")


if __name__ == "__main__":
    sys.exit(main())
