"""Answers, whole or as lines of JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from penstock.gateway.apis.openai.objects import TopLogprob, chat_logprobs
from penstock.gateway.models.language.dataplane import ChoiceDelta, TokenLogprob, Usage
from penstock.gateway.requests.context import RequestContext
from penstock.tokenizers import Part, ReasoningPart, TextPart, ToolCallPart

LOADED_BEFORE = 1
"""Nanoseconds of `load_duration`: the model was there. Clients in Go read 0 as if it was missing."""
_encode = msgspec.json.Encoder().encode


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaAnswer:
    """Of one request, as far as it is written: what is new of it is taken from here."""

    def __init__(
        self,
        model: str,
        context: RequestContext,
        usage: Usage,
        *,
        is_chat: bool,
        is_silent: bool = False,
        prompt: list[int] | None = None,
    ) -> None:
        """`usage` goes on counting. `is_silent`: only the prompt counts, and the one token that engines make at least
        is not shown. `prompt`: its tokens, where the end is to have those of prompt and answer."""
        self._model = model
        self._context = context
        self._usage = usage
        self._is_chat = is_chat
        self._calls: dict[int, list[str]] = {}
        """Names and arguments of calls that are not taken yet: Ollama shows whole calls."""
        self._is_silent = is_silent
        self._tokens = None if prompt is None else list(prompt)
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None

    def add(self, delta: ChoiceDelta) -> None:
        if self._is_silent:
            self.finish_reason = None if delta.finish_reason is None else "length"
            return
        if self._tokens is not None:
            self._tokens += delta.token_ids
        if delta.logprobs:
            self._logprobs += delta.logprobs
        parts: Sequence[Part] = (TextPart(delta.text),) if delta.parts is None else delta.parts
        for part in parts:
            match part:
                case TextPart(text):
                    self._texts.append(text)
                case ReasoningPart(text):
                    self._thoughts.append(text)
                case ToolCallPart():
                    self._calls.setdefault(part.index, [part.name or ""]).append(part.arguments)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason

    def taken(self) -> dict[str, Any] | None:
        """What is new, without calls that may go on; None when there is nothing."""
        complete = len(self._calls) - (0 if self.finish_reason is not None else 1)
        calls = [self._calls.pop(index) for index in sorted(self._calls)[: max(0, complete)]]
        text, thought = "".join(self._texts), "".join(self._thoughts)
        logprobs = {"logprobs": _shown_logprobs(self._logprobs)} if self._logprobs else {}
        self._texts, self._thoughts, self._logprobs = [], [], []
        if not (text or thought or calls or logprobs):
            return None
        shown = [shown for call in calls if (shown := _shown_call(call)) is not None]
        return {**self._shown(text, thought, shown), **logprobs}

    def _shown(self, text: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        thinking = {"thinking": thought} if thought else {}
        if not self._is_chat:
            return {"response": text, **thinking}
        called = {"tool_calls": calls} if calls else {}
        return {"message": {"role": "assistant", "content": text, **thinking, **called}}

    def nothing(self) -> dict[str, Any]:
        return self._shown("", "", [])

    def line(self, new: dict[str, Any]) -> bytes:
        return _encode({"model": self._model, "created_at": now(), **new, "done": False}) + b"\n"

    def end(self, new: dict[str, Any] | None) -> bytes:
        """The last line, or the whole answer. Durations are in nanoseconds."""
        ended, record = time.monotonic(), self._context.record
        first = ended if record.first_token_at is None else record.first_token_at
        body = {
            "model": self._model,
            "created_at": now(),
            **(self.nothing() if new is None else new),
            "done": True,
            "done_reason": "length" if self.finish_reason == "length" else "stop",
            "total_duration": _ns(ended - self._context.arrival),
            "load_duration": LOADED_BEFORE,
            "prompt_eval_count": self._usage.prompt_tokens,
            "prompt_eval_duration": _ns(first - self._context.arrival),
            "eval_count": 0 if self._is_silent else self._usage.completion_tokens,
            "eval_duration": _ns(ended - first),
            **({} if self._tokens is None else {"context": self._tokens}),
        }
        return _encode(body) + b"\n"


class OllamaLines(OllamaAnswer):
    """The frames of a stream."""

    live = 1

    def __init__(self, *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        self.heartbeat = self.line(self.nothing())

    def render(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        for delta in deltas:
            self.add(delta)
        if self.finish_reason is not None:
            self.live = 0
        new = self.taken()
        return b"" if new is None else self.line(new)

    def ending(self) -> bytes:
        return self.end(None)


def _shown_call(call: list[str]) -> dict[str, Any] | None:
    """None for one that was cut off, so that its arguments are no JSON, or whose arguments nest too deep to be read."""
    name, *arguments = call
    try:
        return {"function": {"name": name, "arguments": msgspec.json.decode("".join(arguments) or "{}")}}
    except (msgspec.DecodeError, RecursionError):
        return None


def _shown_logprobs(entries: Sequence[TokenLogprob]) -> list[TopLogprob]:
    """As OpenAI shows them; without a list of the likeliest tokens where none was asked for."""
    shown = chat_logprobs(entries).content
    return [entry if entry.top_logprobs else TopLogprob(entry.token, entry.logprob, entry.bytes) for entry in shown]


def _ns(seconds: float) -> int:
    return max(1, round(seconds * 1e9))
