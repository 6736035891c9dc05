"""POST /api/chat and /api/generate."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.engines.quantities import parse_duration
from penstock.gateway.apis.ollama.answers import OllamaAnswer, OllamaLines, now
from penstock.gateway.apis.ollama.fitting import PromptWindow, fitted_chat, window, with_prompt
from penstock.gateway.apis.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest, Options, model_name
from penstock.gateway.apis.ollama.translation import (
    openai_chat,
    openai_completion,
    sampling_fields,
    template_messages,
    whole,
    widened,
    with_images,
    with_note,
    within_openai,
)
from penstock.gateway.apis.openai.chat import chat_generation, upstream_chat
from penstock.gateway.apis.openai.validation import WHAT_FITS, completion_generate_request
from penstock.gateway.generating.endpoint import TranslatingEndpoint
from penstock.gateway.generating.fitting import only_prompt
from penstock.gateway.generating.request_reading import JsonBody, parse
from penstock.gateway.generating.streams import stream
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.entries import UpstreamAnswer, UpstreamChat
from penstock.gateway.models.language.dataplane import GenerateRequest as TextRequest
from penstock.gateway.models.language.dataplane import Generation, ServedModel
from penstock.gateway.models.language.models import LoadedModel, NameHolder
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.exchange import Exchange
from penstock.tokenizers import ANY_ROLE

_FOR_EVER = 100 * 365 * 86400.0
"""As long as that, or longer: neither timers nor dates go on for ever."""


def seconds_of(keep_alive: float | str) -> float:
    """Of a number of seconds, or a text such as "5m" or "1h30m". Negative: for ever. Raises InvalidRequestError."""
    negative = isinstance(keep_alive, str) and keep_alive.startswith("-")
    try:
        seconds = parse_duration(keep_alive.removeprefix("-")) if isinstance(keep_alive, str) else float(keep_alive)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        message = 'keep_alive must be a number of seconds, or a duration such as "5m".'
        raise InvalidRequestError(message, param="keep_alive")
    return -seconds if negative else seconds


def lets_go(keep_alive: float | str | None) -> bool:
    """Whether the model is to go when its requests have ended. Raises InvalidRequestError."""
    return keep_alive is not None and not seconds_of(keep_alive)


def keep(models: Catalogue, model: LoadedModel, keep_alive: float | str, context: RequestContext) -> bool:
    """Carries it out for models that fall asleep or are loaded on demand. False: this one stays loaded.
    Raises InvalidRequestError."""
    seconds = seconds_of(keep_alive)
    followed = models.keep(model, seconds if 0 <= seconds < _FOR_EVER else None, context)
    if not (followed or seconds):
        context.ignore("keep_alive", "this model stays loaded.")
    return followed


_JSON_LINES = b"application/x-ndjson"
_PROMPT_ALONE = re.compile(r"\{\{-?\s*\.Prompt\s*-?\}\}")
_R = TypeVar("_R", OllamaChatRequest, OllamaGenerateRequest)
_A = TypeVar("_A", bound=OllamaAnswer)


class _Endpoint(TranslatingEndpoint[_R]):
    schema: type[_R]
    is_chat: bool

    def _parse(self, body: JsonBody) -> _R:
        request = parse(body, self.schema, {})
        if request.keep_alive is not None:
            seconds_of(request.keep_alive)
        return request

    def _respond(
        self, exchange: Exchange, request: _R, text_request: TextRequest, generation: Generation
    ) -> Awaitable[None]:
        if request.keep_alive is not None:
            keep(self._dataplane.models, self._loaded(request, exchange.context), request.keep_alive, exchange.context)
        return self._respond_from(exchange, request, generation)

    async def _answer_unloaded(self, exchange: Exchange, request: _R) -> bool:
        if not (self._is_empty(request) and lets_go(request.keep_alive) and self._goes(request, exchange.context)):
            return False
        await self._answer_empty(exchange, request, "unload")
        return True

    def _goes(self, request: _R, context: RequestContext) -> bool:
        """Lets the request's model go, and does not load it for that. False: it stays. Raises PermissionDeniedError,
        ModelNotFoundError, NotReadyError."""
        name, models = self._model_name(request), self._dataplane.models
        context.principal.require_model(name)
        if models.is_on_demand(name):
            return True
        served = models.resolved(name, self.kind, context).served
        return isinstance(served, NameHolder) and keep(models, served.model, 0, context)

    async def _answered_without_text(self, exchange: Exchange, request: _R) -> bool:
        if lets_go(request.keep_alive):
            message = "the other server decides how long it keeps its model."
            exchange.context.ignore("keep_alive", message)
        if self._is_empty(request):
            await self._answer_empty(exchange, request, "load")
            return True
        return False

    def _respond_from(
        self, exchange: Exchange, request: _R, generation: Generation | UpstreamAnswer
    ) -> Awaitable[None]:
        if request.stream is False:
            return self._answer(exchange, request, generation)
        lines = self._answer_of(OllamaLines, exchange, request, generation)
        return stream(exchange, generation, lines, ending=lines.ending, content_type=_JSON_LINES, early=lines.heartbeat)

    async def _answer(self, exchange: Exchange, request: _R, generation: Generation | UpstreamAnswer) -> None:
        answer = self._answer_of(OllamaAnswer, exchange, request, generation)
        async for deltas in generation:
            for delta in deltas:
                answer.add(delta)
        await exchange.respond(200, answer.end(answer.taken()))

    def _answer_of(
        self, kind: type[_A], exchange: Exchange, request: _R, generation: Generation | UpstreamAnswer
    ) -> _A:
        return kind(
            request.model,
            exchange.context,
            generation.usage,
            is_chat=self.is_chat,
            is_silent=request.options is not None and whole(request.options.num_predict) == 0,
            prompt=self._shown_prompt(request, generation),
        )

    def _shown_prompt(self, request: _R, generation: Generation | UpstreamAnswer) -> list[int] | None:
        """The tokens with which the answer's `context` begins; None: it has none."""
        return None

    async def _answer_at_once(self, exchange: Exchange, request: _R) -> bool:
        """An empty request asks for the model to be loaded."""
        if not self._is_empty(request):
            return False
        model = self._loaded(request, exchange.context)
        with model.in_flight:
            await model.sleep.awake()
            if request.keep_alive is not None:
                keep(self._dataplane.models, model, request.keep_alive, exchange.context)
        await self._answer_empty(exchange, request, "load")
        return True

    async def _answer_empty(self, exchange: Exchange, request: _R, reason: str) -> None:
        empty = {"message": {"role": "assistant", "content": ""}} if self.is_chat else {"response": ""}
        body = {"model": request.model, "created_at": now(), **empty, "done": True, "done_reason": reason}
        await exchange.respond(200, msgspec.json.encode(body))

    def _model_name(self, request: _R) -> str:
        return model_name(request.model, self._dataplane.models.__contains__)

    def _renamed(self, request: _R, model: str) -> _R:
        return msgspec.structs.replace(request, model=model)

    @abstractmethod
    def _is_empty(self, request: _R) -> bool: ...

    def _loaded(self, request: _R, context: RequestContext) -> LoadedModel:
        return self._dataplane.models.language(self._model_name(request), context).model

    def _described(self, request: _R, context: RequestContext) -> ServedModel:
        return self._dataplane.model(self._model_name(request), context)

    async def _chat(
        self,
        request: _R,
        tools: list[dict[str, Any]] | None,
        messages: list[dict[str, Any]],
        context: RequestContext,
        before: Sequence[int] = (),
    ) -> TextRequest:
        """`before`: tokens that go before the chat's."""
        name, options = self._model_name(request), request.options or Options()
        model = self._dataplane.model(name, context)
        sampling = sampling_fields(options, context)
        chat = openai_chat(request, name, tools, within_openai(sampling), context, model)
        bounds = window(options, model.info.context_length, context)

        async def render(shown: list[dict[str, Any]], cut: bool) -> TextRequest:
            variant = msgspec.structs.replace(chat, truncate_prompt_tokens=WHAT_FITS) if cut else chat
            return await chat_generation(self._dataplane, self._settings, variant, shown, context)

        cut = request.truncate is not False
        text_request = await fitted_chat(messages, render, bounds, context, cut=cut)
        if before:
            text_request = _continued(before, text_request, model)
            prompt = bounds.shortened(only_prompt(text_request), "context", context, cut=cut)
            text_request = with_prompt(text_request, prompt)
        return widened(bounds.limited(text_request), sampling, context)

    def _openai_chat(
        self,
        request: _R,
        tools: list[dict[str, Any]] | None,
        messages: list[dict[str, Any]],
        context: RequestContext,
    ) -> UpstreamChat:
        """For a model of another server."""
        if request.logprobs:
            raise UnsupportedError("logprobs: models of other servers are asked without.", param="logprobs")
        sampling = sampling_fields(request.options or Options(), context)
        return upstream_chat(openai_chat(request, self._model_name(request), tools, sampling, context), messages)


class OllamaChat(_Endpoint[OllamaChatRequest]):
    schema = OllamaChatRequest
    is_chat = True

    def _is_empty(self, request: OllamaChatRequest) -> bool:
        return not request.messages

    async def _generate_request(self, request: OllamaChatRequest, context: RequestContext) -> TextRequest:
        model = self._described(request, context)
        messages = template_messages(
            request.messages or (), context, model.template_roles, reads_images=model.reads_images
        )
        return await self._chat(request, request.tools, messages, context)

    async def _upstream_chat(self, request: OllamaChatRequest, context: RequestContext) -> UpstreamChat:
        messages = template_messages(request.messages or (), context, frozenset({ANY_ROLE}))
        return self._openai_chat(request, request.tools, messages, context)


class Generate(_Endpoint[OllamaGenerateRequest]):
    """A prompt is the one message of a chat, unless it is `raw`, has a `suffix`, or the model has no chat template."""

    schema = OllamaGenerateRequest
    is_chat = False

    def _parse(self, body: JsonBody) -> OllamaGenerateRequest:
        request = super()._parse(body)
        if request.raw and (request.system or request.context or request.template):
            message = "raw: this prompt goes to the model as it is, without system, context and template."
            raise InvalidRequestError(message, param="raw")
        if request.suffix and request.context:
            raise InvalidRequestError("suffix: a text with a gap has no context before it.", param="suffix")
        return request

    def _is_empty(self, request: OllamaGenerateRequest) -> bool:
        return not (request.prompt or request.images)

    def _shown_prompt(
        self, request: OllamaGenerateRequest, generation: Generation | UpstreamAnswer
    ) -> list[int] | None:
        if request.raw or request.suffix or not isinstance(generation, Generation):
            return None
        if generation.has_images:  # its tokens alone would show nothing of them
            return None
        return generation.prompt_token_ids[0]

    async def _generate_request(self, request: OllamaGenerateRequest, context: RequestContext) -> TextRequest:
        loaded = self._loaded(request, context)
        source = None if loaded.chat_template is None else loaded.chat_template.source
        as_it_is = _goes_as_it_is(request, source)
        if as_it_is or request.suffix or loaded.chat_template is None:
            return await self._completion(request, context)
        reads_images = self._described(request, context).reads_images
        messages = _messages(request, context, reads_images=reads_images)
        return await self._chat(request, None, messages, context, before=request.context or ())

    async def _completion(self, request: OllamaGenerateRequest, context: RequestContext) -> TextRequest:
        name, options = self._model_name(request), request.options or Options()
        model = self._dataplane.model(name, context)
        if request.system:
            context.ignore("system", "the prompt goes to the model without a chat template.")
        text: str | list[int] = request.prompt or ""
        if request.images:
            text = with_note(str(text), "images", context)
        bounds = window(options, model.info.context_length, context)
        if not request.suffix:
            text = await self._tokens(request, str(text), bounds, context)
        sampling = sampling_fields(options, context)
        completion = openai_completion(request, name, text, within_openai(sampling), context)
        text_request = completion_generate_request(completion, model, self._settings, context)
        text_request = widened(text_request, sampling, context)
        return text_request if request.suffix else bounds.limited(text_request)

    async def _tokens(
        self, request: OllamaGenerateRequest, text: str, bounds: PromptWindow, context: RequestContext
    ) -> list[int]:
        cut = request.truncate is not False
        tokens = await self._dataplane.text_prompt(self._model_name(request), text, context, cut=cut)
        return bounds.shortened([*(request.context or ()), *tokens], "prompt", context, cut=cut)

    async def _upstream_chat(self, request: OllamaGenerateRequest, context: RequestContext) -> UpstreamChat:
        for name in ("raw", "suffix", "context", "template"):
            if getattr(request, name):
                raise UnsupportedError(f"{name}: models of other servers are asked by chats.", param=name)
        return self._openai_chat(request, None, _messages(request, context, reads_images=False), context)


def _continued(before: Sequence[int], text_request: TextRequest, model: ServedModel) -> TextRequest:
    """A token that opens a text stands at its beginning alone, though the template writes one for each prompt."""
    prompt = only_prompt(text_request)
    opens = "bos_token" in (model.template_variables or ()) and prompt[:1] == [before[0]]
    images = tuple(image.moved(len(before) - opens) for image in text_request.images)
    return replace(text_request, prompts=[[*before, *prompt[opens:]]], images=images)


def _messages(request: OllamaGenerateRequest, context: RequestContext, *, reads_images: bool) -> list[dict[str, Any]]:
    text = with_images(request.prompt or "", request.images, "images", context, reads_images=reads_images)
    system = [{"role": "system", "content": request.system}] if request.system else []
    return [*system, {"role": "user", "content": text}]


def _goes_as_it_is(request: OllamaGenerateRequest, source: str | None) -> bool:
    """`template` says how the prompt is written, in Ollama's own language. Of that language this server knows the
    prompt alone, and the model's own template, as /api/show gives it. Raises UnsupportedError."""
    template = (request.template or "").strip()
    if not template or template == (source or "").strip():
        return bool(request.raw)
    if _PROMPT_ALONE.fullmatch(template):
        return True
    message = "template: prompts are written by the model's own chat template; {{ .Prompt }} and raw leave it out."
    raise UnsupportedError(message, param="template")
