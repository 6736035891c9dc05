"""The OpenAI API: responses, streamed or not."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.http_client import HttpClient, encode, merged, shortened
from penstock.loadtest.clients.openai import Count, messages_of
from penstock.loadtest.clients.response import HttpResponse, check_stream, events
from penstock.loadtest.errors import MALFORMED, STREAM_ERROR, TRUNCATED
from penstock.loadtest.messages import Answer, Call


class _Usage(msgspec.Struct, gc=False):
    input_tokens: Count | None = None
    output_tokens: Count | None = None


class _Content(msgspec.Struct):
    text: str | None = None


class _Item(msgspec.Struct):
    content: list[_Content] | None = None


class _Details(msgspec.Struct):
    reason: str | None = None


class _Response(msgspec.Struct):
    status: str | None = None
    output: list[_Item] = []
    usage: _Usage | None = None
    error: Any = None
    incomplete_details: _Details | None = None

    @property
    def finish_reason(self) -> str:
        """In the words of the other OpenAI protocols."""
        reason = self.incomplete_details.reason if self.incomplete_details else None
        return "length" if reason == "max_output_tokens" else reason or "stop"

    @property
    def text(self) -> str:
        return "".join(part.text or "" for item in self.output for part in item.content or ())


class _Event(msgspec.Struct, gc=False):
    type: str
    delta: Any = None


class _LastEvent(msgspec.Struct):
    response: _Response


_decode = msgspec.json.Decoder(_Event).decode
_decode_last = msgspec.json.Decoder(_LastEvent).decode
_decode_whole = msgspec.json.Decoder(_Response).decode
_ENDS = ("response.completed", "response.incomplete")
_FAILURES = ("error", "response.failed", "response.error", "response.cancelled")
_ENDED = ("completed", "incomplete", None)
_TEXT = "response.output_text.delta"


class ResponsesClient(HttpClient):
    """`/v1/responses`. Each delta of text, reasoning, refusal or arguments is a piece of output."""

    def __init__(self, options: ClientOptions) -> None:
        super().__init__(options)
        self._head = self.head("/v1/responses", accept="text/event-stream" if options.stream else "application/json")

    def request(self, call: Call) -> bytes:
        options = self.options
        prompt = call.prompt if isinstance(call.prompt, str) else messages_of(call.prompt)
        body: dict[str, Any] = {"model": options.model, "input": prompt, "store": False}
        if call.output_tokens:
            body["max_output_tokens"] = call.output_tokens
        if options.ignore_eos:
            body["ignore_eos"] = True
        if options.stream:
            body["stream"] = True
        return self.post(self._head, encode(merged(body, options.extra)))

    def read(self, response: HttpResponse, answer: Answer) -> None:
        if self.options.stream:
            self._read_stream(response, answer)
            return
        whole = _decode_whole(response.body)
        if whole.error is not None or whole.status not in _ENDED:
            answer.error, answer.detail = MALFORMED, shortened(response.body)
            return
        if not whole.output:
            raise ValueError(f"an answer without output: {shortened(response.body)}")
        self._end(whole, answer)
        if self.options.keep_text:
            answer.text = whole.text

    def _read_stream(self, response: HttpResponse, answer: Answer) -> None:
        check_stream(response)
        texts: list[str] = []
        for time, data in events(response):
            if data == b"[DONE]":
                continue
            event = _decode(data)
            if event.delta and event.type.endswith(".delta"):
                answer.arrivals.append(time)
                if self.options.keep_text and event.type == _TEXT:
                    texts.append(msgspec.convert(event.delta, str))
            elif event.type in _ENDS:
                self._end(_decode_last(data).response, answer)
            elif event.type in _FAILURES:
                answer.error, answer.detail = STREAM_ERROR, shortened(data)
                return
        if self.options.keep_text:
            answer.text = "".join(texts)
        if answer.finish_reason is None:
            answer.error, answer.detail = TRUNCATED, "the stream ended without response.completed"

    @staticmethod
    def _end(response: _Response, answer: Answer) -> None:
        answer.finish_reason = response.finish_reason
        if response.usage is not None:
            answer.prompt_tokens, answer.output_tokens = response.usage.input_tokens, response.usage.output_tokens
