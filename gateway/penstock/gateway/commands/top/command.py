"""The command line of `penstock top`."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult

from penstock.gateway.commands.top.operator_port import fetch, parse_url

if TYPE_CHECKING:
    from penstock.gateway.commands.top.readings import Readings
    from penstock.gateway.commands.top.view import Picture

_DEFAULT_URL = "http://127.0.0.1:8002"
_LEAST_SECONDS = 0.25
_MOST_REQUESTS = 100


def add_top_command(commands: Any, formatter: Callable[..., argparse.HelpFormatter]) -> None:
    """`commands` are argparse's subparsers."""
    parser = commands.add_parser(
        "top",
        help="watch a running server",
        description="Shows a running server's models, tenants and requests, again and again: queue, KV cache, tokens "
        "per second, latencies (median/95th percentile of the last ten seconds). Without a terminal it prints a line "
        "for each model. Servers of vLLM can be watched as well, without their requests.",
        formatter_class=formatter,
    )
    parser.add_argument("url", nargs="?", default=_DEFAULT_URL, metavar="URL", help="the server's metrics port")
    parser.add_argument("--api-key", metavar="KEY", help="an admin's key; default: the variable OPENAI_API_KEY")
    parser.add_argument("--interval", type=float, default=1.0, metavar="N", help="seconds between two readings")
    parser.add_argument("--count", type=int, metavar="N", help="end after this many readings")
    parser.set_defaults(run_command=partial(_run, parser))


def _run(parser: argparse.ArgumentParser, args: dict[str, Any]) -> int:
    try:
        url = parse_url(args["url"])
    except ValueError as error:
        parser.error(str(error))
    if not args["interval"] >= _LEAST_SECONDS:
        parser.error(f"--interval must be at least {_LEAST_SECONDS:g}")
    if args["count"] is not None and args["count"] < 1:
        parser.error("--count must be at least 1")
    return watch(url, args["api_key"] or os.environ.get("OPENAI_API_KEY"), args["interval"], args["count"])


def watch(url: SplitResult, key: str | None, interval: float, count: int | None) -> int:
    """Until Ctrl-C, or so many readings. The exit status: 1 if the server could not be read the first time."""
    from penstock.gateway.commands.top.readings import Readings
    from penstock.gateway.commands.top.view import view

    readings, shown = Readings(), 0
    first = _picture(url, key, readings)
    if first.trouble:
        print(f"penstock top: {first.trouble}", file=sys.stderr)
        return 1
    screen = view()
    try:
        screen.show(first)
        shown = 1
        while count is None or shown < count:
            time.sleep(interval)
            screen.show(_picture(url, key, readings))
            shown += 1
    except KeyboardInterrupt:
        return 0
    finally:
        screen.close()
    return 0


def _picture(url: SplitResult, key: str | None, readings: Readings) -> Picture:
    """With the figures of the reading before where there is no newer one."""
    from penstock.gateway.commands.top.readings import Reading, RequestLine
    from penstock.gateway.commands.top.view import Picture

    trouble, shown = "", None
    try:
        readings.add(Reading.parsed(fetch(url, "/metrics", key), time.monotonic()))
        shown = _requests(url, key)
    except (OSError, http.client.HTTPException, ValueError) as error:
        trouble = f"{url.geturl()} cannot be read: {getattr(error, 'strerror', None) or error}"
    return Picture(
        url=url.geturl(),
        models=readings.models(),
        tenants=readings.tenants(),
        requests=list(RequestLine.all_of(shown or {})),
        in_flight=None if shown is None else shown.get("in_flight", 0),
        trouble=trouble,
    )


def _requests(url: SplitResult, key: str | None) -> dict[str, Any] | None:
    """None where they are not shown: on another port than that for metrics, and by other servers."""
    try:
        shown = json.loads(fetch(url, f"/debug/requests?limit={_MOST_REQUESTS}", key))
    except ValueError:
        return None
    return shown if isinstance(shown, dict) else None
