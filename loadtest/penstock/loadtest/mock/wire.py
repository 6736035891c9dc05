"""The requests of the reference server, and its answers, made as bytes before they are due."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.loadtest.mock.options import MockOptions

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"
_PHRASES = {200: b"OK", 400: b"Bad Request", 404: b"Not Found", 411: b"Length Required"}
_DEFAULT_TOKENS = 16
_encode = msgspec.json.encode


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Parameters(msgspec.Struct):
    """Of the generate extension; also what `sampling_parameters` holds as text."""

    max_tokens: int | None = None


class Request(msgspec.Struct):
    """Of any protocol: what matters here."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt: Any = None
    messages: list[dict[str, Any]] | None = None
    text_input: str | None = None
    sampling_parameters: str = "{}"
    parameters: Parameters = msgspec.field(default_factory=Parameters)

    @property
    def tokens(self) -> int:
        """Raises msgspec.MsgspecError."""
        sampling = msgspec.json.decode(self.sampling_parameters, type=Parameters)
        limits = (self.max_completion_tokens, self.max_tokens, self.parameters.max_tokens, sampling.max_tokens)
        return max(1, next((count for count in limits if count is not None), _DEFAULT_TOKENS))

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def prompt_tokens(self) -> int:
        """Token ids are counted, texts by their words."""
        if isinstance(self.prompt, list):
            return len(self.prompt)
        texts = [self.prompt, self.text_input, *(message.get("content") for message in self.messages or ())]
        return sum(len(text.split()) for text in texts if isinstance(text, str))


def metadata(options: MockOptions) -> dict[str, Any]:
    """Of a language model as Triton's vLLM backend has them."""
    kinds = {"text_input": "BYTES", "stream": "BOOL", "sampling_parameters": "BYTES"}
    inputs = [{"name": name, "datatype": kind, "shape": [1]} for name, kind in kinds.items()]
    outputs = [{"name": "text_output", "datatype": "BYTES", "shape": [-1]}]
    return {"name": options.model, "versions": ["1"], "platform": "mock", "inputs": inputs, "outputs": outputs}


class Wire:
    """One answer. `token` is the event of any token, `last` ends the stream."""

    __slots__ = ("first", "last", "token", "whole")

    def __init__(
        self, path: str, options: MockOptions, *, tokens: int, prompt_tokens: int, stream: bool, with_usage: bool
    ) -> None:
        chat = path.endswith("/chat/completions")
        openai = chat or path.endswith("/completions")
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
        base: dict[str, Any] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-mock",
            "object": ("chat.completion" + ".chunk" * stream) if chat else "text_completion",
            "created": 0,
            "model": options.model,
        }

        def event(text: str, finish: str | None = None, **delta: str) -> bytes:
            if not openai:
                body: dict[str, Any] = {"model_name": options.model, "model_version": "1", "text_output": text}
            else:
                said: dict[str, Any] = {"text": text}
                if chat:
                    said = {"delta" if stream else "message": {**delta, "content": text}}
                body = base | {"choices": [{"index": 0, **said, "logprobs": None, "finish_reason": finish}]}
            if not stream:
                return json(body | {"usage": usage} if openai else body)
            return sse(_encode(body))

        text = options.text
        if not stream:
            self.whole = event(text * tokens, "length", role="assistant")
            self.first = self.token = self.last = b""
            return
        self.whole = b""
        self.first, self.token = event(text, role="assistant"), event(text)
        single = {"role": "assistant"} if tokens == 1 else {}
        self.last = event(text, "length", **single)
        if openai:
            if with_usage:
                self.last += sse(_encode(base | {"choices": [], "usage": usage}))
            self.last += sse(b"[DONE]")
        self.last += LAST_CHUNK


def sse(data: bytes) -> bytes:
    """An event in a chunk of its own."""
    event = b"data: " + data + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


def json(body: Any, status: int = 200) -> bytes:
    """A whole response."""
    data = _encode(body)
    phrase = _PHRASES[status]
    return b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        status,
        phrase,
        len(data),
        data,
    )
