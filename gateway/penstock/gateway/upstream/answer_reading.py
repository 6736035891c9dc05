"""What another server's answers say, piece by piece: how many tokens, which choices have ended, and how they are shown
under the public name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.gateway.llm.generation import Usage
from penstock.gateway.upstream.failures import Redactor, broken_answer, in_band_error
from penstock.gateway.upstream.held_answers import HeldAnswer

Fields = dict[str, msgspec.Raw]
NULL = b"null"
_MAX_ANSWER = 128 << 20
"""Bytes: 2048 embeddings as JSON are about 80 MiB."""
_MAX_CHOICES = 4096
"""A list of prompts has a choice, or n, for each."""


class _Details(msgspec.Struct):
    cached_tokens: Any = None
    reasoning_tokens: Any = None


class _Usage(msgspec.Struct):
    prompt_tokens: Any = None
    completion_tokens: Any = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None
    tool_calls: Any = None

    @property
    def shows(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls or self.refusal)


class Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    message: _Delta | None = None
    text: Any = None
    finish_reason: str | None = None

    @property
    def shows(self) -> bool:
        """Whether there is something of the answer in it, rather than a role or an end alone."""
        return bool(self.text) or (self.delta is not None and self.delta.shows)

    @property
    def shown_text(self) -> str:
        part = self.delta or self.message
        text = self.text if part is None else part.content
        return text if isinstance(text, str) else ""


_usage = msgspec.json.Decoder(_Usage)
_choices = msgspec.json.Decoder(list[Choice] | None)
_fields = msgspec.json.Decoder(Fields)


class AnswerReader:
    """Of one answer."""

    def __init__(
        self,
        model: str,
        usage: Usage,
        redact: Redactor,
        held: HeldAnswer,
        *,
        choices: int,
        listener: Callable[[int, str], None] | None = None,
    ) -> None:
        """`model` is the public name; `usage` is filled in; so many `choices` were asked for. `listener` is called with
        each choice's number and text."""
        self.model = model
        self.usage = usage
        self.held = held
        self.asked_choices = choices
        self.has_usage = False
        """Whether the other server has said it."""
        self._shown_model = msgspec.Raw(msgspec.json.encode(model))
        self._redact = redact
        self._listener = listener
        self._kept = 0

    def hold(self, size: int) -> None:
        """The answer has so many bytes in memory now. Raises UpstreamError where one alone may not have as many,
        OverloadedError where all may not."""
        if self._kept + size > _MAX_ANSWER:
            raise broken_answer(self.model, f"it is longer than {_MAX_ANSWER} bytes")
        self.held.note(self._kept + size)

    def keep(self, size: int) -> None:
        """So many bytes stay in memory until the answer ends. Raises as `hold`."""
        self._kept += size
        self.hold(0)

    def fields(self, data: bytes | bytearray) -> Fields:
        """Of an answer or an event, with the public name. Raises PenstockError for an error in it."""
        try:
            fields = _fields.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
            raise broken_answer(self.model, "it is not JSON") from None
        error = fields.get("error")
        if error is not None and bytes(error) != NULL:
            raise in_band_error(self.model, bytes(error), self._redact)
        if "model" in fields:
            fields["model"] = self._shown_model
        return fields

    def choices(self, raw: msgspec.Raw) -> list[Choice]:
        choices: list[Choice] | None
        try:
            choices = _choices.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
            choices = None
        if choices is None or not all(0 <= choice.index < _MAX_CHOICES for choice in choices):
            raise broken_answer(self.model, "its choices cannot be read")
        if self._listener is not None:
            for choice in choices:
                self._listener(choice.index, choice.shown_text)
        return choices

    def read_usage(self, raw: msgspec.Raw) -> None:
        """What cannot be read is passed over: the answer is good without."""
        try:
            found = _usage.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
            return
        self.has_usage = True
        usage = self.usage
        usage.prompt_tokens = _count(found.prompt_tokens)
        usage.completion_tokens = _count(found.completion_tokens)
        if found.prompt_tokens_details is not None:
            usage.cached_tokens = min(usage.prompt_tokens, _count(found.prompt_tokens_details.cached_tokens))
        if found.completion_tokens_details is not None:
            usage.reasoning_tokens = _count(found.completion_tokens_details.reasoning_tokens)


def _count(value: object) -> int:
    """0 for what is no sensible number of tokens."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value <= 1 << 40 else 0  # type: ignore[operator, return-value]
