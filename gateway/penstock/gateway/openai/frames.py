"""Deltas as server-sent events.

Nearly all of a chunk is the same from token to token. So each choice has these bytes ready, and only the JSON of the
new text is put between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.gateway.generating.streams import COMMENT
from penstock.gateway.llm.dataplane import ChoiceDelta
from penstock.gateway.openai.objects import Head, UsageObject

_encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"
_RUNNING = b',"logprobs":null,"finish_reason":null}]'

LogprobsFormat = Callable[[int, Sequence[Any]], object]


class Frames:
    """Renders the deltas of one call.

    `opening` and `closing` stand around the text inside a choice: `"text":` and nothing, or `"delta":{"content":`
    and `}`. `logprobs`, `extra` and `usage` give more fields for a choice's delta, for the choice, and for the chunk.
    """

    heartbeat = COMMENT

    def __init__(
        self,
        head: Head,
        choices: int,
        *,
        opening: bytes,
        closing: bytes = b"",
        logprobs: LogprobsFormat | None = None,
        extra: Callable[[ChoiceDelta], Mapping[str, object]] | None = None,
        usage: Callable[[int | None], object] | None = None,
        announce_usage: bool = False,
    ) -> None:
        """`announce_usage`: the usage comes in a last chunk, and each chunk before it says `null`, as OpenAI's do."""
        self._start = b"data: " + _encode(head)[:-1]
        choice = self._start + b',"choices":[{"index":'
        self._prefixes = [choice + b"%d," % index + opening for index in range(choices)]
        self._closing = closing
        self._no_usage = b',"usage":null' if announce_usage else b""
        self._suffix = closing + _RUNNING + self._no_usage + b"}\n\n"
        self._logprobs = logprobs
        self._extra = extra
        self._usage = usage
        self._plain = logprobs is None and extra is None and usage is None
        self.live = choices
        """Choices whose finish reason has not been rendered."""

    def render(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """The frames of these deltas; empty if they have nothing to show."""
        parts: list[bytes] = []
        for delta in deltas:
            if delta.finish_reason is None and self._plain:
                if delta.text:
                    parts += (self._prefixes[delta.index], _encode(delta.text), self._suffix)
            elif delta.text or delta.token_ids or delta.logprobs or delta.finish_reason:
                parts.append(self._chunk(delta.index, _encode(delta.text), self._fields(delta)))
        return b"".join(parts)

    def _fields(self, delta: ChoiceDelta) -> dict[str, object]:
        """What a choice's chunk has beside its text: finish reason, logprobs, token ids. Called once for each delta."""
        logprobs: object = None
        if self._logprobs is not None and delta.logprobs:
            logprobs = self._logprobs(delta.index, delta.logprobs)
        fields: dict[str, object] = {"logprobs": logprobs, "finish_reason": delta.finish_reason}
        if delta.finish_reason is not None:
            self.live -= 1
            fields["stop_reason"] = delta.stop_reason
        if self._extra is not None:
            fields.update(self._extra(delta))
        return fields

    def _chunk(self, index: int, shown: bytes, fields: Mapping[str, object]) -> bytes:
        parts = (self._prefixes[index], shown, self._closing, b",", _encode(fields)[1:], b"]")
        return b"".join(parts) + self._tail(index)

    def role(self, index: int, prompt_token_ids: list[int] | None) -> bytes:
        """The chunk that opens a chat choice."""
        fields = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        extra = b"" if prompt_token_ids is None else b',"prompt_token_ids":' + _encode(prompt_token_ids)
        return self._start + extra + b',"choices":[' + fields % index + b"]" + self._tail(None)

    def text(self, index: int, text: str) -> bytes:
        """A chunk with this text, before the first delta of a chat choice."""
        fields = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (index, _encode(text))
        return self._start + b',"choices":[' + fields + b"]" + self._tail(None)

    def _tail(self, index: int | None) -> bytes:
        if self._usage is None:
            return self._no_usage + b"}\n\n"
        return b',"usage":' + _encode(self._usage(index)) + b"}\n\n"

    def end(self, usage: UsageObject | None) -> bytes:
        """The usage chunk, if asked for, and `[DONE]`."""
        if usage is None:
            return _DONE
        return self._start + b',"choices":[],"usage":' + _encode(usage) + b"}\n\n" + _DONE
