"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial

from penstock.gateway.front.context import RequestContext
from penstock.gateway.generating.bodies import parse
from penstock.gateway.generating.endpoint import GeneratingEndpoint
from penstock.gateway.generating.streams import collect, stream
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.llm.dataplane import GenerateRequest, Generation
from penstock.gateway.openai.completion_result import CompletionResult
from penstock.gateway.openai.frames import Frames
from penstock.gateway.openai.objects import new_head, running_usage, spliced, usage_object
from penstock.gateway.openai.schemas import CompletionRequest, StreamOptions
from penstock.gateway.openai.unsupported import COMPLETION
from penstock.gateway.openai.validation import completion_generate_request


class Completions(GeneratingEndpoint[CompletionRequest]):
    text_api = "completions"

    def _parse(self, body: bytes) -> CompletionRequest:
        return parse(body, CompletionRequest, COMPLETION)

    def _model_name(self, request: CompletionRequest) -> str:
        return request.model

    async def _generate_request(self, request: CompletionRequest, context: RequestContext) -> GenerateRequest:
        model = self._dataplane.model(request.model, context)
        return completion_generate_request(request, model, self._settings, context)

    def _respond(
        self, exchange: Exchange, request: CompletionRequest, wanted: GenerateRequest, generation: Generation
    ) -> Awaitable[None]:
        respond = self._stream if request.stream else self._answer
        return respond(exchange, request, CompletionResult(request, wanted, generation))

    def _stream(self, exchange: Exchange, request: CompletionRequest, result: CompletionResult) -> Awaitable[None]:
        options = request.stream_options or StreamOptions()
        frames = Frames(
            new_head("cmpl", "text_completion", request.model, self._settings.system_fingerprint),
            result.choices,
            opening=b'"text":',
            logprobs=result.logprobs if request.logprobs is not None else None,
            extra=result.token_ids if request.return_token_ids else None,
            usage=partial(running_usage, result.generation) if options.continuous_usage_stats else None,
            announce_usage=bool(options.include_usage),
        )

        def ending() -> bytes:
            return frames.end(usage_object(result.usage) if options.include_usage else None)

        return stream(exchange, result.deltas(), frames, ending=ending)

    async def _answer(self, exchange: Exchange, request: CompletionRequest, result: CompletionResult) -> None:
        collected = await collect(result.deltas(), result.choices)
        head = new_head("cmpl", "text_completion", request.model, self._settings.system_fingerprint)
        choices = [result.choice(index, each) for index, each in enumerate(collected)]
        body = spliced(head, choices=choices, usage=usage_object(result.usage))
        await exchange.respond(200, body)
