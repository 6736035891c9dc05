"""The command line of `penstock bench`. What measures is imported when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from penstock.engines.errors import PenstockError
from penstock.gateway.commands.bench.options import LISTS, SETTINGS, EngineBench, PerplexityBench
from penstock.gateway.configuration.config import SECTIONS, ConfigError, explain, load_config
from penstock.gateway.configuration.flag_hints import FLAG_HINTS
from penstock.gateway.configuration.flags import add_sections

_INTERRUPTED = 130


def add_bench_command(commands: Any, formatter: Callable[..., argparse.HelpFormatter]) -> None:
    """`commands` are argparse's subparsers."""
    parser = commands.add_parser("bench", help="measure an engine, or a model's quality, without a server")
    kinds = parser.add_subparsers(required=True, metavar="WHAT")
    kinds.add_parser(
        "engine",
        help="speed and memory of an engine",
        usage="penstock bench engine [MODEL] [options]",
        description="Loads MODEL, by default the demo model, in this process and measures prompts, decode steps, "
        "memory and loading, beside what this machine can do at most.",
        argument_default=argparse.SUPPRESS,
        formatter_class=formatter,
        hints=FLAG_HINTS,
        fill=partial(_add_options, options=EngineBench, module="penstock.gateway.commands.bench.engine_bench"),
    )
    kinds.add_parser(
        "perplexity",
        help="how well a model predicts a text",
        usage="penstock bench perplexity [MODEL] [options]",
        description="Loads MODEL, by default the demo model, in this process and computes its perplexity on a text; "
        "with --compare also how much other settings change its distributions.",
        argument_default=argparse.SUPPRESS,
        formatter_class=formatter,
        hints=FLAG_HINTS,
        fill=_add_perplexity_options,
    )


def _add_perplexity_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text in UTF-8, in place of the library's")
    _add_options(parser, PerplexityBench, "penstock.gateway.commands.bench.perplexity_bench")


def _add_options(parser: argparse.ArgumentParser, options: type[msgspec.Struct], module: str) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures into this file, too")
    parser.add_argument("--config", type=Path, metavar="FILE", help="read settings from this TOML or YAML file")
    add_sections(parser, {"bench": options}, lists=LISTS)
    add_sections(parser, SECTIONS, positional="model", only=SETTINGS)
    parser.set_defaults(run_command=partial(_run, parser, options, module))


def _run(parser: argparse.ArgumentParser, options: type[msgspec.Struct], module: str, arguments: dict[str, Any]) -> int:
    """The report of the module's `run`, shown and written."""
    target, file, text = arguments.pop("json", None), arguments.pop("config", None), arguments.pop("text", None)
    own = {name: arguments.pop(name) for name in options.__struct_fields__ if name in arguments}
    if text is not None and "stdlib" in own:
        parser.error("--text and --stdlib: there can be only one text")
    try:
        settings = msgspec.convert(own, options, strict=False)
        config = load_config(arguments, file=file)
        if target is not None:
            target.touch()  # fails now, and not when everything is measured
        bench = import_module(module)
        report = bench.run(config, settings) if text is None else bench.run(config, settings, text)
    except msgspec.ValidationError as error:
        parser.error(explain(str(error)))
    except ConfigError as error:
        parser.error(str(error))
    except (PenstockError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{parser.prog}: stopped", file=sys.stderr)
        return _INTERRUPTED
    print(bench.table(report))
    if target is not None:
        target.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return 0
