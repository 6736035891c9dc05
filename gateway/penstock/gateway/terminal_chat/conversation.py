"""What has been said, and what a request is made of."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Any

from .api import ChatApi, Piece


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
