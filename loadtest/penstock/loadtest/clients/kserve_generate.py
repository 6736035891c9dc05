"""Triton's generate extension: `/v2/models/M/generate_stream` and `/generate`."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.http_client import HttpClient, encode, shortened
from penstock.loadtest.clients.kserve_model import LanguageForm, model_metadata
from penstock.loadtest.clients.response import HttpResponse, breaks_off, check_stream, events
from penstock.loadtest.errors import STREAM_ERROR, TRUNCATED, LoadTestError
from penstock.loadtest.messages import Answer, Call


class _Event(msgspec.Struct, gc=False):
    """One element of a tensor is a scalar, several are an array."""

    text_output: str | list[str] | None = None
    num_output_tokens: int | list[int] | None = None
    num_input_tokens: int | list[int] | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class GenerateClient(HttpClient):
    """A stream is complete when its last chunk has come: there is no [DONE]. Where the model counts the tokens of each
    event, these are the pieces of output, else each event with text is one."""

    def __init__(self, options: ClientOptions) -> None:
        super().__init__(options)
        path = f"/v2/models/{quote(options.model, safe='')}/generate"
        if options.stream:
            self._head = self.head(path + "_stream", accept="text/event-stream")
        else:
            self._head = self.head(path)
        self._form: LanguageForm | None = None

    async def open(self) -> None:
        self._form = LanguageForm(self.options, await model_metadata(self.options))

    def request(self, call: Call) -> bytes:
        if self._form is None:
            raise LoadTestError("the client has not been opened")
        return self.post(self._head, encode(self._form.values(call)))

    def read(self, response: HttpResponse, answer: Answer) -> None:
        if self.options.stream:
            self._read_stream(response, answer)
            return
        event = _decode(response.body)
        if event.error is not None or event.text_output is None:
            raise ValueError(f"an answer without text_output: {shortened(response.body)}")
        answer.output_tokens, answer.prompt_tokens = _total(event.num_output_tokens), _total(event.num_input_tokens)
        if self.options.keep_text:
            answer.text = _joined(event.text_output)

    def _read_stream(self, response: HttpResponse, answer: Answer) -> None:
        check_stream(response)
        texts: list[str] = []
        foreign = begun = False
        for time, data in events(response):
            event = _decode(data)
            if event.error is not None:
                answer.error, answer.detail = STREAM_ERROR, shortened(data)
                return
            foreign = foreign or event.text_output is None
            begun = begun or event.text_output is not None
            note(answer, time, _joined(event.text_output), _total(event.num_output_tokens))
            if event.num_input_tokens is not None:
                answer.prompt_tokens = _total(event.num_input_tokens)
            if self.options.keep_text:
                texts.append(_joined(event.text_output))
        if self.options.keep_text:
            answer.text = "".join(texts)
        if foreign and not begun:
            raise ValueError("no event of the stream has text_output")
        if not begun or breaks_off(response):
            answer.error = TRUNCATED
            answer.detail = "the stream ended within an event" if begun else "the stream has no events"


def note(answer: Answer, time: float, text: str, tokens: int | None) -> None:
    """Adds what a response of a language model has brought."""
    if tokens is not None:
        answer.output_tokens = (answer.output_tokens or 0) + tokens
        if tokens:
            answer.pieces.append(tokens)
            answer.arrivals.append(time)
    elif text:
        answer.arrivals.append(time)


def _joined(text: str | list[str] | None) -> str:
    return "".join(text) if isinstance(text, list) else text or ""


def _total(count: int | list[int] | None) -> int | None:
    return sum(count) if isinstance(count, list) else count
