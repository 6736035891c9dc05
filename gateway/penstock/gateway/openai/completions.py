"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace
from functools import partial

from starlette.types import Receive, Scope, Send

from penstock.gateway.dataplane import DataPlane
from penstock.gateway.http.call import Call
from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.openai.collect import collect
from penstock.gateway.openai.completion_result import CompletionResult
from penstock.gateway.openai.logprobs import CompletionLogprobsFormat
from penstock.gateway.openai.objects import new_head, running_usage, spliced, usage_object
from penstock.gateway.openai.schemas import CompletionRequest, StreamOptions
from penstock.gateway.openai.sse import Frames, stream
from penstock.gateway.openai.unsupported import COMPLETION
from penstock.gateway.openai.validation import completion_generate_request, parse


class Completions:
    def __init__(self, dataplane: DataPlane, settings: AppSettings) -> None:
        self._dataplane = dataplane
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        async with Call(exchange) as call:
            request = parse(await exchange.body(self._settings.max_body_bytes), CompletionRequest, COMPLETION)
            call.watch()
            model = self._dataplane.model(request.model)
            wanted = completion_generate_request(request, model, self._settings, exchange.tenant)
            generation = await self._dataplane.generate(replace(wanted, timeout=exchange.timeout()))
            try:
                result = CompletionResult(request, wanted, generation)
                if request.stream:
                    await self._stream(exchange, request, result)
                else:
                    await self._answer(exchange, request, result)
            finally:
                generation.close()

    def _stream(self, exchange: Exchange, request: CompletionRequest, result: CompletionResult) -> Awaitable[None]:
        options = request.stream_options or StreamOptions()
        frames = Frames(
            new_head("cmpl", "text_completion", request.model, self._settings.system_fingerprint),
            result.choices,
            opening=b'"text":',
            logprobs=CompletionLogprobsFormat() if request.logprobs is not None else None,
            extra=result.token_ids if request.return_token_ids else None,
            usage=partial(running_usage, result.generation) if options.continuous_usage_stats else None,
        )

        def ending() -> bytes:
            return frames.end(result.usage if options.include_usage else None)

        return stream(exchange, result.deltas(), frames, ending=ending)

    async def _answer(self, exchange: Exchange, request: CompletionRequest, result: CompletionResult) -> None:
        collected = await collect(result.deltas(), result.choices)
        head = new_head("cmpl", "text_completion", request.model, self._settings.system_fingerprint)
        choices = [result.choice(index, each) for index, each in enumerate(collected)]
        body = spliced(head, choices=choices, usage=usage_object(result.usage))
        await exchange.respond(200, body)
