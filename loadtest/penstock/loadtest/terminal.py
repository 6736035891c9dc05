"""The live view on a terminal."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.loadtest.progress import Progress

_WIDTH = 48


class Terminal:
    """Redrawn in place, without a thread of its own, which would take the clients' time. Gone at the end, when
    the report comes."""

    seconds = 0.25

    def __init__(self, stream: TextIO, title: str) -> None:
        self._title = title
        self._console = Console(file=stream)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        self._live.update(Text(f"{title}: getting ready", style="bold"), refresh=True)

    def show(self, progress: Progress) -> None:
        self._live.update(self._drawing(progress), refresh=True)

    def note(self, text: str) -> None:
        self._console.print(Text(text))

    def close(self) -> None:
        self._live.stop()

    def _drawing(self, progress: Progress) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column()
        for name, text in progress.parts():
            bad = name == "errors" and progress.errors
            grid.add_row(name, Text(text, style="red" if bad else ""))
        share = progress.share
        bar = ProgressBar(total=1.0, completed=share or 0.0, width=_WIDTH, pulse=share is None)
        whole = Table.grid()  # a bar by itself does not end its line
        for part in (Text(self._title, style="bold"), bar, grid):
            whole.add_row(part)
        return whole
