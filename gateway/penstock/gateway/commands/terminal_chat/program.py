"""The two ways to run: lines from a terminal, or one prompt from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import closing, suppress
from typing import Any, TextIO

from .api import ChatApi, ChatError, Piece

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


class Conversation:
    def __init__(self, api: ChatApi, model: str, system: str | None = None, **options: Any) -> None:
        """`options` go into each request, unless they are None."""
        self._api = api
        self._fields = {"model": model, **{name: value for name, value in options.items() if value is not None}}
        self.system = system
        self._turns: list[dict[str, str]] = []

    def clear(self) -> None:
        self._turns = []

    def ask(self, text: str) -> Generator[Piece]:
        """Raises ChatError. What has arrived is kept when the iterator is closed early; without any of it the question
        is forgotten, too."""
        question = {"role": "user", "content": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        answer: list[str] = []
        try:
            with closing(self._api.answer(self._fields | {"messages": [*system, *self._turns, question]})) as pieces:
                for piece in pieces:
                    answer.append(piece.text)
                    yield piece
        finally:
            if any(answer):
                self._turns += [question, {"role": "assistant", "content": "".join(answer)}]


_HELP = (
    "/clear forgets the conversation, /system TEXT tells the model how to answer, /exit ends. Ctrl-C stops an answer."
)
_PROMPT = "> "


def answer_once(conversation: Conversation, prompt: str, screen: Screen) -> None:
    """Raises ChatError, KeyboardInterrupt."""
    if not prompt.strip():
        raise ChatError("there is no prompt on standard input")
    _show_answer(conversation, prompt, screen)


def talk(conversation: Conversation, screen: Screen) -> None:
    """Until the user ends it."""
    with suppress(ImportError):  # gives input() a history and editing; not there on Windows
        import readline  # noqa: F401
    screen.end(_HELP)
    while True:
        try:
            line = input(_PROMPT).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            screen.end("/exit or Ctrl-D ends")
            continue
        if line == "/exit":
            return
        if line.startswith("/"):
            screen.end(_command(conversation, line))
        elif line:
            _answer(conversation, line, screen)


def _answer(conversation: Conversation, line: str, screen: Screen) -> None:
    try:
        _show_answer(conversation, line, screen)
    except KeyboardInterrupt:
        screen.end("stopped")
    except ChatError as error:
        screen.end()
        print(error, file=sys.stderr)


def _show_answer(conversation: Conversation, prompt: str, screen: Screen) -> None:
    reason = None
    with closing(conversation.ask(prompt)) as pieces:
        for piece in pieces:
            screen.show(piece)
            reason = piece.finish_reason or reason
    screen.end("the answer was cut at its most tokens" if reason == "length" else "")


def _command(conversation: Conversation, line: str) -> str:
    """Carries out what a line with a slash says, and returns what to tell the user."""
    name, _, text = line.partition(" ")
    if name == "/clear":
        conversation.clear()
        return "the conversation is forgotten"
    if name == "/system":
        if text.strip():
            conversation.system = text.strip()
        return f"system: {conversation.system}" if conversation.system else "there is no system prompt"
    return _HELP
