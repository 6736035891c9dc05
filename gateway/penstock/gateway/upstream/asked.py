"""A request that another server is answering."""

from __future__ import annotations

from collections import Counter

from penstock.engines.errors import InvalidRequestError, PenstockError
from penstock.gateway.errors import UpstreamError
from penstock.gateway.llm.adapters import CallCounter
from penstock.gateway.upstream.answer_reading import AnswerReader
from penstock.gateway.upstream.attempts import OpenAnswer


class Asked:
    """A model's answer that has begun: counted until its end."""

    def __init__(self, answer: OpenAnswer, reader: AnswerReader, calls: CallCounter, tokens: Counter[str]) -> None:
        """`calls` and `tokens` are the model's."""
        self.answer = answer
        self.reader = reader
        self._calls = calls
        self._tokens = tokens
        self._ended = False

    def failed(self, error: PenstockError) -> None:
        """What it says, or does not say, is an error."""
        if isinstance(error, UpstreamError):
            well: bool | None = False
        else:
            well = True if isinstance(error, InvalidRequestError) else None
        self.answer.end(error.code, well=well)

    def end(self) -> None:
        """Idempotent. What is not complete is given up."""
        if not self._ended:
            self._ended = True
            self.answer.end("cancelled")
            self.reader.held.note(0)
            self._calls.end()
            self._tokens["prompt"] += self.reader.usage.prompt_tokens
            self._tokens["completion"] += self.reader.usage.completion_tokens
