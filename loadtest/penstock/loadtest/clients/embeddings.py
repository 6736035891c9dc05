"""The OpenAI API: embeddings."""

from __future__ import annotations

import msgspec

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.http_client import HttpClient, encode, merged, shortened
from penstock.loadtest.clients.openai import Usage, text_or_ids
from penstock.loadtest.clients.response import HttpResponse
from penstock.loadtest.messages import Answer, Call, Prompt

_EMPTY = (b"[]", b'""', b"null")


class _Embedding(msgspec.Struct):
    embedding: msgspec.Raw
    """Not looked into: numbers, or their base64."""


class _Body(msgspec.Struct):
    data: list[_Embedding]
    usage: Usage | None = None


_decode = msgspec.json.Decoder(_Body).decode


class EmbeddingsClient(HttpClient):
    """`/v1/embeddings`. A request has `batch_size` inputs: the call's prompt, and it again with its words, or token
    ids, turned round by one each time, so that no two are equal. Nothing is generated: there is no first token."""

    def __init__(self, options: ClientOptions) -> None:
        super().__init__(options)
        self._head = self.head("/v1/embeddings")

    def request(self, call: Call) -> bytes:
        size, prompt = self.options.batch_size, text_or_ids(call.prompt)
        inputs = prompt if size == 1 else [_turned(prompt, place) for place in range(size)]
        return self.post(self._head, encode(merged({"model": self.options.model, "input": inputs}, self.options.extra)))

    def read(self, response: HttpResponse, answer: Answer) -> None:
        body = _decode(response.body)
        vectors = sum(bytes(item.embedding) not in _EMPTY for item in body.data)
        if vectors != self.options.batch_size:
            raise ValueError(f"{vectors} embeddings, not {self.options.batch_size}: {shortened(response.body)}")
        answer.output_tokens = 0
        if body.usage is not None:
            answer.prompt_tokens = body.usage.prompt_tokens


def _turned(prompt: Prompt, places: int) -> Prompt:
    if isinstance(prompt, str):
        words = prompt.split(" ")
        turn = places % len(words)
        return " ".join(words[turn:] + words[:turn])
    turn = places % len(prompt)
    return [*prompt[turn:], *prompt[:turn]]
