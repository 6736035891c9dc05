"""Views of `penstock top`: tables on a terminal, else a line for each model and reading."""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from penstock.gateway.commands.top.readings import ModelLine, RequestLine, TenantLine

_MOST_TENANTS = 8
_HISTORY = 60
_BARS = " ▁▂▃▄▅▆▇█"
_UNPRINTABLE = dict.fromkeys((*range(32), *range(127, 160), 0x202E, 0x2066, 0x2067), "?")
"""Names come from clients: they must not move the cursor, nor turn the direction of the text."""


@dataclass(frozen=True)
class Picture:
    """The state of a server."""

    url: str
    models: Sequence[ModelLine]
    tenants: Sequence[TenantLine]
    requests: Sequence[RequestLine]
    in_flight: int | None
    """None: the server does not show its requests, or this key may not see them."""
    trouble: str = ""
    """Why there is nothing newer."""


class TopView(Protocol):
    def show(self, picture: Picture) -> None: ...

    def close(self) -> None: ...


def view() -> TopView:
    """On standard output. Tables need a terminal and rich."""
    stream = sys.stdout
    if stream.isatty():
        try:
            return TerminalTables(stream)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "rich":
                raise
    return PlainLines(stream)


class PlainLines:
    """For files and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, picture: Picture) -> None:
        now = time.strftime("%H:%M:%S")
        if picture.trouble:
            print(f"{now} {picture.trouble}", file=self._stream, flush=True)
            return
        for model in picture.models:
            figures = " ".join(f"{name} {text}" for name, text in _figures(model))
            print(f"{now} {_plain(model.name)} {figures}", file=self._stream, flush=True)
        if not picture.models:
            print(f"{now} no language model", file=self._stream, flush=True)

    def close(self) -> None:
        """Everything is written."""


class TerminalTables:
    """Redrawn in place, without a thread of its own."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream)
        self._live = Live(console=self._console, auto_refresh=False, screen=True)
        self._live.start()
        self._rates: dict[str, deque[float]] = {}

    def show(self, picture: Picture) -> None:
        for model in picture.models if not picture.trouble else ():
            self._rates.setdefault(model.name, deque(maxlen=_HISTORY)).append(model.output_rate)
        self._live.update(self._drawing(picture), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def _drawing(self, picture: Picture) -> Any:
        from rich.console import Group
        from rich.text import Text

        running = sum(model.running for model in picture.models)
        waiting = sum(model.waiting for model in picture.models)
        parts: list[Any] = [Text(f"{picture.url}   {running} running, {waiting} waiting   Ctrl-C ends", style="bold")]
        if picture.trouble:
            parts.append(Text(_plain(picture.trouble), style="red"))
        parts.append(self._models(picture.models))
        tenants = picture.tenants[:_MOST_TENANTS]
        if len(tenants) > 1:
            rows = [(_plain(line.name), *_tenant_figures(line)) for line in tenants]
            parts.append(_table(("tenant", "requests/s", "tokens/s", "waiting"), rows))
        room = shutil.get_terminal_size().lines - len(picture.models) - len(tenants) - 12
        parts.append(_requests(picture, max(0, room)))
        return Group(*parts)

    def _models(self, models: Iterable[ModelLine]) -> Any:
        rows = []
        for model in models:
            state = "" if model.ready else " (not ready)"
            figures = [text for _, text in _figures(model)]
            rows.append((_plain(model.name) + state, *figures, _bars(self._rates.get(model.name, ()))))
        names = ("running", "waiting", "kv", "prompt/s", "tokens/s", "hits", "ttft", "itl", "preempted")
        return _table(("model", *names, "tokens/s, last minute"), rows)


def _requests(picture: Picture, room: int) -> Any:
    from rich.text import Text

    if picture.in_flight is None:
        return Text("requests in flight are not shown: the metrics port has them, for an admin's key", style="dim")
    rows = [
        (
            _plain(line.id),
            _plain(line.tenant),
            _plain(line.model),
            line.stage,
            f"{line.seconds:.1f} s",
            str(line.tokens),
        )
        for line in picture.requests[:room]
    ]
    title = f"requests in flight: {picture.in_flight}, the oldest first"
    return _table(("request", "tenant", "model", "stage", "for", "tokens"), rows, title)


def _table(names: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, title=title, title_justify="left", header_style="dim", padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=True, justify="left" if name in _TEXTS else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


_TEXTS = ("model", "tenant", "request", "stage", "tokens/s, last minute")


def _figures(model: ModelLine) -> list[tuple[str, str]]:
    return [
        ("running", str(model.running)),
        ("waiting", str(model.waiting)),
        ("kv", _percent(model.cache_share)),
        ("prompt/s", f"{model.prompt_rate:.0f}"),
        ("tokens/s", f"{model.output_rate:.0f}"),
        ("hits", _percent(model.hit_share)),
        ("ttft", _latency(model.ttft)),
        ("itl", _latency(model.itl)),
        ("preempted", str(model.preemptions)),
    ]


def _tenant_figures(line: TenantLine) -> tuple[str, str, str]:
    return f"{line.request_rate:.1f}", f"{line.token_rate:.0f}", str(line.waiting)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def _latency(quantiles: tuple[float, float] | None) -> str:
    """Median and 95th percentile in milliseconds."""
    return "-" if quantiles is None else "/".join(f"{1000 * seconds:.3g}" for seconds in quantiles) + " ms"


def _bars(rates: Iterable[float]) -> str:
    history = list(rates)
    most = max(history, default=0.0)
    if most <= 0:
        return ""
    return "".join(_BARS[round((len(_BARS) - 1) * rate / most)] for rate in history)


def _plain(text: str) -> str:
    return text.translate(_UNPRINTABLE)
