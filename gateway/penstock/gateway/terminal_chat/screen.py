"""What is shown of an answer."""

from __future__ import annotations

from typing import TextIO

from .api import Piece

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""A model's text must not move the cursor or change the terminal."""


class Screen:
    def __init__(self, out: TextIO, *, colored: bool) -> None:
        """Where it is not `colored`, only answers are shown: that is for scripts."""
        self._out = out
        self._colored = colored
        self._thinking = False
        self._line_open = False

    def show(self, piece: Piece) -> None:
        if piece.reasoning and self._colored:
            if not self._thinking:
                self._write(_DIM)
                self._thinking = True
            self._write_text(piece.reasoning)
        if piece.text:
            self._end_thought()
            self._write_text(piece.text)
        self._out.flush()

    def end(self, note: str = "") -> None:
        """Ends the answer's line; `note` says what is not as usual."""
        self._end_thought()
        if self._line_open:
            self._write("\n")
            self._line_open = False
        if note and self._colored:
            self._write(f"{_DIM}[{note}]{_PLAIN}\n")
        self._out.flush()

    def _end_thought(self) -> None:
        if self._thinking:
            self._thinking = False
            self._write(_PLAIN + ("\n" if self._line_open else ""))
            self._line_open = False

    def _write_text(self, text: str) -> None:
        text = text.translate(_CONTROLS)
        if text:
            self._write(text)
            self._line_open = not text.endswith("\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
