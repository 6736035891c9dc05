"""The end of a line on a terminal whose last line may hold a progress bar."""

from __future__ import annotations

from typing import TextIO


def line_end(stream: TextIO) -> str:
    """Ends a line. The server leaves the cursor at the start of its bar, so the next line replaces the bar, whichever
    process writes it; on a terminal the rest of a longer bar must be erased, too."""
    return "\x1b[K\n" if stream.isatty() else "\n"
