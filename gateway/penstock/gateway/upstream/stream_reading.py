"""A stream of another server, from its bytes to the frames that a client gets."""

from __future__ import annotations

import msgspec

from penstock.engines.errors import PenstockError
from penstock.gateway.generating.streams import COMMENT
from penstock.gateway.upstream.answer_reading import NULL, AnswerReader, Choice
from penstock.gateway.upstream.failures import broken_answer

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

    def _note(self, choice: Choice) -> None:
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
