"""The two ways to run: lines from a terminal, or one prompt from a pipe."""

from __future__ import annotations

import sys
from contextlib import closing, suppress

from .conversation import Conversation
from .errors import ChatError
from .screen import Screen

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
