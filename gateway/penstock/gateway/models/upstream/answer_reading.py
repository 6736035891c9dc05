"""Readers of other servers' answers and streams: tokens, ended choices, and the frames that a client gets under the
public name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.engines.errors import OverloadedError, PenstockError
from penstock.gateway.generating.streams import COMMENT
from penstock.gateway.models.language.generation import Usage
from penstock.gateway.models.upstream.failures import Redactor, broken_answer, in_band_error

# Bytes of other servers' answers that are in memory until more of them has come. Each may be large; together they
# have a bound.

_SMALL = 64 << 10
"""Bytes. What an answer holds up to this is not counted: connections hold more."""


class HeldAnswers:
    """Plain data, for the event loop."""

    def __init__(self, limit: int) -> None:
        """`limit` in bytes."""
        self.limit = limit
        self.held = 0


class HeldAnswer:
    """The part of one answer."""

    def __init__(self, answers: HeldAnswers) -> None:
        self._answers = answers
        self._size = 0

    def note(self, size: int) -> None:
        """The answer holds so many bytes now; 0 at its end. Raises OverloadedError."""
        counted = size if size > _SMALL else 0
        answers = self._answers
        held = answers.held + counted - self._size
        if counted > self._size and held > answers.limit:
            message = (
                f"{answers.held} bytes of other servers' answers are in memory, and this one has no room beside them."
            )
            raise OverloadedError(message, retry_after=1)
        answers.held, self._size = held, counted


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


class UpstreamChoice(msgspec.Struct):
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
_choices = msgspec.json.Decoder(list[UpstreamChoice] | None)
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

    def choices(self, raw: msgspec.Raw) -> list[UpstreamChoice]:
        choices: list[UpstreamChoice] | None
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
            counts = _usage.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
            return
        self.has_usage = True
        usage = self.usage
        usage.prompt_tokens = _count(counts.prompt_tokens)
        usage.completion_tokens = _count(counts.completion_tokens)
        if counts.prompt_tokens_details is not None:
            usage.cached_tokens = min(usage.prompt_tokens, _count(counts.prompt_tokens_details.cached_tokens))
        if counts.completion_tokens_details is not None:
            usage.reasoning_tokens = _count(counts.completion_tokens_details.reasoning_tokens)


def _count(value: object) -> int:
    """0 for what is no sensible number of tokens."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value <= 1 << 40 else 0  # type: ignore[operator, return-value]


MAX_EVENT = 4 << 20
"""Bytes of one event."""
LAST = b"data: [DONE]\n\n"
_DONE = b"[DONE]"


class StreamReader:
    """Plain data: `feed` bytes as they come, and `end` where they end."""

    def __init__(self, answer: AnswerReader, *, shows_usage: bool) -> None:
        self.done = False
        """The stream has said that it is over."""
        self.has_text = False
        """A first piece of the answer is here."""
        self.error: PenstockError | None = None
        """The stream is broken, or says that it failed: what `feed` gave before it is good."""
        self.finish_reasons: tuple[str, ...] = ()
        self._answer = answer
        self._shows_usage = shows_usage
        self._open: set[int] = set()
        self._ended: set[int] = set()
        self._rest = bytearray()
        """Of a line that is not complete. Pieces and lines may be of very few bytes, so they are put together at
        once."""
        self._data: bytes | bytearray | None = None
        """Of the event whose lines are read."""

    def feed(self, piece: bytes) -> bytes:
        """The frames of all events that are complete now. Nothing that follows the stream's last word counts."""
        if self.done:
            return b""
        frames: list[bytes] = []
        try:
            for line in self._lines(piece):
                frame = self._line(line)
                if frame:
                    frames.append(frame)
                if self.done:
                    break
            self._answer.hold(len(self._rest) + len(self._data or b""))
        except PenstockError as error:
            self.error = error
        return b"".join(frames)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing: a stream may leave out its last word, if all choices that were asked for have
        ended."""
        return self.done or (len(self._ended) >= self._answer.asked_choices and not self._open)

    def end(self) -> None:
        """There are no more bytes. Raises UpstreamError for a stream that ended in the middle."""
        if not self.complete:
            raise broken_answer(self._answer.model, "it ended in the middle")

    def _lines(self, piece: bytes) -> list[bytes]:
        """Those that are complete now."""
        if b"\n" not in piece:
            self._keep(piece)
            return []
        lines = (bytes(self._rest) + piece).split(b"\n") if self._rest else piece.split(b"\n")
        self._rest.clear()
        self._keep(lines.pop())
        return lines

    def _keep(self, rest: bytes) -> None:
        if rest:
            self._rest += rest
            self._check_size(len(self._rest))

    def _check_size(self, size: int) -> None:
        if size > MAX_EVENT:
            raise broken_answer(self._answer.model, f"an event is longer than {MAX_EVENT} bytes")

    def _line(self, line: bytes) -> bytes:
        """Empty where there is nothing to send."""
        if line.endswith(b"\r"):
            line = line[:-1]
        if line.startswith(b"data:"):
            self._add(line[6:] if line[5:6] == b" " else line[5:])
            return b""
        if line:
            return COMMENT if line.startswith(b":") else b""
        if self._data is None:
            return b""
        data, self._data = bytes(self._data), None
        return self._event(data)

    def _add(self, value: bytes) -> None:
        """One more line of the event."""
        if self._data is None:
            self._data = value
        else:
            if isinstance(self._data, bytes):
                self._data = bytearray(self._data)
            self._data += b"\n" + value
        self._check_size(len(self._data))

    def _event(self, data: bytes) -> bytes:
        if data.strip() == _DONE:
            self.done = True
            return b""
        fields = self._answer.fields(_in_one_line(data))
        if "choices" not in fields and "usage" not in fields:
            raise broken_answer(self._answer.model, "an event has no choices")
        choices = self._answer.choices(fields["choices"]) if "choices" in fields else []
        usage = fields.get("usage")
        if usage is not None:
            if bytes(usage) != NULL:
                self._answer.read_usage(usage)
            if not self._shows_usage:
                if not choices:  # the event that was asked for in the client's name
                    return b""
                del fields["usage"]
        for choice in choices:
            self._note(choice)
        return b"data: " + msgspec.json.encode(fields) + b"\n\n"

    def _note(self, choice: UpstreamChoice) -> None:
        if choice.shows:
            self.has_text = True
            if not self._answer.has_usage:  # about: most servers send an event for each token
                self._answer.usage.completion_tokens += 1
        if choice.finish_reason is None:
            if choice.index not in self._ended:
                self._open.add(choice.index)
        elif choice.index not in self._ended:
            self._ended.add(choice.index)
            self._open.discard(choice.index)
            self.finish_reasons += (choice.finish_reason,)


def _in_one_line(data: bytes) -> bytes:
    """White space between JSON's tokens may break lines, and would end the event that a client gets."""
    if b"\n" not in data and b"\r" not in data:
        return data
    try:
        return msgspec.json.format(data, indent=-1)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return data  # its reader says what is wrong
