"""The OpenAI API: chat and text completions, streamed or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.http1 import ParsedAnswer
from penstock.loadtest.clients.http_client import HttpClient
from penstock.loadtest.clients.sse import events
from penstock.loadtest.errors import STREAM_ERROR, TRUNCATED, LoadTestError
from penstock.loadtest.messages import Answer, Call, Prompt

_encode = msgspec.json.Encoder().encode


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None


class _Body(msgspec.Struct):
    """A chunk of a stream, or a whole answer."""

    choices: Sequence[_Choice] = ()
    usage: Usage | None = None
    error: msgspec.Raw | None = None


_decode = msgspec.json.Decoder(_Body).decode


class CompletionsClient(HttpClient):
    """`/v1/chat/completions` (`chat`) or `/v1/completions`."""

    def __init__(self, options: ClientOptions, *, chat: bool) -> None:
        super().__init__(options)
        self._chat = chat
        self._path = "/v1/chat/completions" if chat else "/v1/completions"

    def request(self, call: Call) -> bytes:
        options = self.options
        body: dict[str, Any] = {"model": options.model}
        if self._chat:
            body["messages"] = messages_of(call.prompt)
        elif isinstance(call.prompt, str) or (call.prompt and isinstance(call.prompt[0], int)):
            body["prompt"] = call.prompt
        else:
            raise LoadTestError("a prompt of messages needs a protocol for chats")
        if call.output_tokens:
            body["max_tokens"] = call.output_tokens
        if options.ignore_eos:
            body["ignore_eos"] = True
        if options.stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        accept = "text/event-stream" if options.stream else "application/json"
        return self.post(self._path, _encode(body | options.extra), accept=accept)

    def read(self, response: ParsedAnswer, answer: Answer) -> None:
        if self.options.stream:
            self._read_stream(response, answer)
        else:
            body = _decode(response.body)
            answer.arrivals = [answer.ended]
            texts: list[str] = []
            self._take(body, answer, texts)
            answer.text = texts[0] if texts else None
            if answer.output_tokens is not None:
                answer.pieces = [answer.output_tokens]

    def _read_stream(self, response: ParsedAnswer, answer: Answer) -> None:
        done = False
        texts: list[str] = []
        for time, data in events(response):
            if data == b"[DONE]":
                done = True
                continue
            body = _decode(data)
            if body.error is not None:
                answer.error, answer.detail = STREAM_ERROR, bytes(body.error)[:300].decode("utf-8", "replace")
                return
            if self._take(body, answer, texts):
                answer.arrivals.append(time)
        if self.options.keep_text:
            answer.text = "".join(texts)
        if not done or answer.finish_reason is None:
            answer.error = TRUNCATED
            answer.detail = "the stream has no finish reason" if done else "the stream ended without [DONE]"

    def _take(self, body: _Body, answer: Answer, texts: list[str]) -> bool:
        """Notes what a chunk says; True if it holds output."""
        found = False
        for choice in body.choices:
            message = choice.delta or choice.message
            text = choice.text or (message and (message.content or message.reasoning_content or message.reasoning))
            found = found or bool(text) or (message is not None and message.tool_calls is not None)
            if choice.finish_reason is not None:
                answer.finish_reason = choice.finish_reason
            if text and self.options.keep_text:
                texts.append(text)
        if body.usage is not None:
            answer.prompt_tokens, answer.output_tokens = body.usage.prompt_tokens, body.usage.completion_tokens
        return found


def messages_of(prompt: Prompt) -> list[dict[str, Any]]:
    """As chat messages. Raises LoadTestError for token ids."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages = [message for message in prompt if isinstance(message, dict)]
    if len(messages) != len(prompt):
        raise LoadTestError("token ids cannot be sent as chat messages: use --protocol openai-completions")
    return messages
