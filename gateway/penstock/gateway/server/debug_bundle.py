"""`penstock debug bundle`: one file for a report of a problem, without secrets and without texts of requests."""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

from penstock.engines.host.crash_folder import FILES, crashes
from penstock.engines.host.failure_text import one_line
from penstock.engines.host.machine_facts import machine, variables, versions
from penstock.engines.host.redaction import Redaction
from penstock.gateway.commands.top.operator_port import MOST_BYTES, fetch, parse_url
from penstock.gateway.configuration.config import Config, ConfigError, load_config, sections
from penstock.gateway.configuration.sections.server import ServerConfig

_VIEWS = {
    "settings.json": "/debug/settings",
    "scheduler.json": "/debug/scheduler",
    "requests.json": "/debug/requests",
    "metrics.txt": "/metrics",
}
"""What is fetched from the port for metrics of a running server."""


@dataclass(frozen=True)
class _Source:
    """What is packed, as the command's flags say."""

    config: Config | None
    """None: it cannot be read, which `trouble` tells."""
    trouble: str
    crash_folder: Path | None
    url: SplitResult | None
    key: str | None


def add_debug_command(commands: Any, formatter: Any) -> None:
    """`commands` are argparse's subparsers."""
    debug = commands.add_parser("debug", help="collect files for a bug report", formatter_class=formatter)
    verbs = debug.add_subparsers(required=True, metavar="COMMAND")
    parser = verbs.add_parser(
        "bundle",
        help="pack a file for a bug report",
        description="Packs the newest crashes, versions, the machine's limits, the settings, and what a running server "
        "shows of its state. Keys, tokens and passwords are left out, and there are no texts of requests. Look through "
        "it before you send it: names of models, tenants and folders are in it.",
        formatter_class=formatter,
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: penstock-debug-TIME.tar.gz")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the server's configuration file")
    parser.add_argument("--crash-dir", metavar="DIR", help="the server's crash-dir, where no configuration names it")
    parser.add_argument("--url", metavar="URL", help="a running server's port for metrics, as http://127.0.0.1:8002")
    parser.add_argument("--api-key", metavar="KEY", help="an admin's key for --url; default: variable OPENAI_API_KEY")
    parser.set_defaults(run_command=lambda args: _run(parser, args))


def _run(parser: argparse.ArgumentParser, args: Mapping[str, Any]) -> int:
    now = datetime.now(UTC)
    output = args["output"] or Path(f"penstock-debug-{now:%Y%m%d-%H%M%S}.tar.gz")
    files = _collect(_source(parser, args))
    try:
        with open(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            try:
                _pack(files, output.name.partition(".")[0] or "bundle", file)
            except BaseException:
                output.unlink()
                raise
    except OSError as error:
        parser.error(f"{output} cannot be written: {error.strerror}")
    for name, data in files.items():
        print(f"{len(data):>10,}  {name}")
    print(f"{output} has these {len(files)} files; look through them before you send it", file=sys.stderr)
    return 0


def _source(parser: argparse.ArgumentParser, args: Mapping[str, Any]) -> _Source:
    url = None
    if args["url"] is not None:
        try:
            url = parse_url(args["url"])
        except ValueError as error:
            parser.error(f"--url: {error}")
    config, trouble = None, ""
    try:
        config = load_config({} if args["crash_dir"] is None else {"crash_dir": args["crash_dir"]}, file=args["config"])
    except ConfigError as error:
        trouble = str(error)
    folder = (config or Config(server=ServerConfig(crash_dir=args["crash_dir"]))).server.crash_folder
    return _Source(config, trouble, folder, url, args["api_key"] or os.environ.get("OPENAI_API_KEY"))


def _collect(source: _Source) -> dict[str, bytes]:
    """By name. Whatever cannot be had is told in its place: a report without it is better than none."""
    redaction = Redaction()
    redaction.tree({"api_key": source.key})
    settings = {"trouble": source.trouble} if source.config is None else sections(source.config)
    files = {
        "machine.json": _json(redaction, {"versions": versions(), "machine": machine(), "variables": variables()}),
        "settings.json": _json(redaction, settings),
    }
    if source.url is not None:
        files |= {f"server/{name}": data for name, data in _views(redaction, source.url, source.key)}
    for name, text in _crash_files(source.crash_folder):
        files[f"crashes/{name}"] = _as_it_may_be_shown(redaction, text)
    return files


def _crash_files(folder: Path | None) -> Iterator[tuple[str, str]]:
    """Of the newest crash first."""
    if folder is None:
        yield "none.txt", "The settings say that nothing is kept of crashes.\n"
        return
    try:
        places = crashes(folder)
    except OSError as error:
        yield "none.txt", f"{folder}: {error.strerror}\n"
        return
    if not places:
        yield "none.txt", f"{folder} has none.\n"
    for place in places:
        for name in FILES:
            with suppress(OSError), (place / name).open("rb") as file:
                yield f"{place.name}/{name}", file.read(MOST_BYTES).decode("utf-8", "replace")


def _views(redaction: Redaction, url: SplitResult, key: str | None) -> Iterator[tuple[str, bytes]]:
    for name, path in _VIEWS.items():
        try:
            text = fetch(url, path, key)
        except (OSError, http.client.HTTPException, ValueError) as error:
            text = one_line(str(error)) or type(error).__name__
            yield f"{name}.failed.txt", redaction.text(f"{path}: {text}\n").encode()
        else:
            yield name, _as_it_may_be_shown(redaction, text)


def _as_it_may_be_shown(redaction: Redaction, text: str) -> bytes:
    """JSON is read, so that its names say what is secret in it."""
    try:
        return _json(redaction, json.loads(text))
    except (ValueError, RecursionError):
        return redaction.text(text).encode()


def _json(redaction: Redaction, tree: Any) -> bytes:
    return json.dumps(redaction.tree(tree), indent=1, ensure_ascii=False, default=str).encode() + b"\n"


def _pack(files: Mapping[str, bytes], folder: str, file: Any) -> None:
    """Raises OSError."""
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))
