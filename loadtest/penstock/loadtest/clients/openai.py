"""The OpenAI API: chat and text completions, streamed or not."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.http_client import HttpClient, encode, merged, shortened
from penstock.loadtest.clients.response import HttpResponse, check_stream, events
from penstock.loadtest.errors import STREAM_ERROR, TRUNCATED, LoadTestError
from penstock.loadtest.messages import Answer, Call, Prompt

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
"""Of tokens: what is none would be in every figure."""
_GIVEN_UP = frozenset({"abort", "cancelled", "error"})
"""Finish reasons of answers that are not whole."""


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class _Message(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def text(self) -> str | None:
        return self.content or self.reasoning_content or self.reasoning or self.refusal


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None


class _Body(msgspec.Struct, gc=False):
    """A chunk of a stream, or a whole answer."""

    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    object: str | None = None


_decode = msgspec.json.Decoder(_Body).decode


class CompletionsClient(HttpClient):
    """`/v1/chat/completions` (`chat`) or `/v1/completions`."""

    def __init__(self, options: ClientOptions, *, chat: bool) -> None:
        super().__init__(options)
        self._chat = chat
        self._head = self.head(
            "/v1/chat/completions" if chat else "/v1/completions",
            accept="text/event-stream" if options.stream else "application/json",
        )

    def request(self, call: Call) -> bytes:
        options = self.options
        body: dict[str, Any] = {"model": options.model}
        if self._chat:
            body["messages"] = messages_of(call.prompt)
        else:
            body["prompt"] = text_or_ids(call.prompt)
        if call.output_tokens:
            body["max_tokens"] = call.output_tokens
        if options.ignore_eos:
            body["ignore_eos"] = True
        if options.stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        return self.post(self._head, encode(merged(body, options.extra)))

    def read(self, response: HttpResponse, answer: Answer) -> None:
        if self.options.stream:
            self._read_stream(response, answer)
        else:
            self._read_whole(response, answer)

    def _read_whole(self, response: HttpResponse, answer: Answer) -> None:
        body = _decode(response.body)
        if not body.choices:
            raise ValueError(f"an answer without choices: {shortened(response.body)}")
        texts: list[str] = []
        self._take(body, answer, texts)
        if self.options.keep_text:
            answer.text = "".join(texts)
        _check_end(answer)

    def _read_stream(self, response: HttpResponse, answer: Answer) -> None:
        check_stream(response)
        done = False
        texts: list[str] = []
        for time, data in events(response):
            if data == b"[DONE]":
                done = True
                continue
            body = _decode(data)
            if body.error is not None or body.object == "error":
                answer.error, answer.detail = STREAM_ERROR, shortened(data)
                return
            if self._take(body, answer, texts):
                answer.arrivals.append(time)
        if self.options.keep_text:
            answer.text = "".join(texts)
        if (self.options.end_mark and not done) or answer.finish_reason is None:
            answer.error = TRUNCATED
            missing = "ended without [DONE]" if answer.finish_reason else "has no finish reason"
            answer.detail = f"the stream {missing}"
        _check_end(answer)

    def _take(self, body: _Body, answer: Answer, texts: list[str]) -> bool:
        """Notes what a chunk says; True if it holds output."""
        has_text = False
        for choice in body.choices or ():
            message = choice.delta or choice.message
            text = choice.text or (message and message.text)
            has_text = has_text or bool(text) or bool(message and message.tool_calls)
            if choice.finish_reason:  # some have an empty one in all chunks but the last
                answer.finish_reason = choice.finish_reason
            if text and self.options.keep_text:
                texts.append(text)
        if body.usage is not None:
            answer.prompt_tokens, answer.output_tokens = body.usage.prompt_tokens, body.usage.completion_tokens
        return has_text


def _check_end(answer: Answer) -> None:
    if answer.finish_reason in _GIVEN_UP:
        answer.error, answer.detail = TRUNCATED, f"the server ended the answer with {answer.finish_reason!r}"


def text_or_ids(prompt: Prompt) -> Prompt:
    """Raises LoadTestError for chat messages."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return prompt
    raise LoadTestError("a prompt of messages needs a protocol for chats")


def messages_of(prompt: Prompt) -> list[dict[str, Any]]:
    """As chat messages. Raises LoadTestError for token ids."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages = [message for message in prompt if isinstance(message, dict)]
    if len(messages) != len(prompt):
        raise LoadTestError("token ids cannot be sent as chat messages: use --protocol openai-completions")
    return messages
