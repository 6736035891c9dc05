"""POST /api/chat and /api/generate."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.generating.bodies import parse
from penstock.gateway.generating.other_chats import OtherAnswer, OtherChat
from penstock.gateway.generating.sse import stream
from penstock.gateway.generating.translating_endpoint import TranslatingEndpoint
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.llm.dataplane import GenerateRequest as WantedText
from penstock.gateway.llm.dataplane import Generation
from penstock.gateway.ollama.answers import Answer, Lines, now
from penstock.gateway.ollama.keep_alive import keep, seconds_of
from penstock.gateway.ollama.names import model_name
from penstock.gateway.ollama.schemas import UNSUPPORTED, ChatRequest, GenerateRequest, Message
from penstock.gateway.ollama.translation import openai_chat, openai_completion, template_messages
from penstock.gateway.openai.chat_generation import chat_generation
from penstock.gateway.openai.other_chat import other_chat
from penstock.gateway.openai.validation import completion_generate_request

_JSON_LINES = b"application/x-ndjson"
_R = TypeVar("_R", ChatRequest, GenerateRequest)


class _Endpoint(TranslatingEndpoint[_R]):
    schema: type[_R]
    unsupported = UNSUPPORTED
    is_chat: bool

    def _parse(self, body: bytes) -> _R:
        request = parse(body, self.schema, self.unsupported)
        if request.keep_alive is not None:
            seconds_of(request.keep_alive)
        return request

    def _respond(self, exchange: Exchange, request: _R, wanted: WantedText, generation: Generation) -> Awaitable[None]:
        model, _ = self._dataplane.models.find(self._model_name(request), context=exchange.context)
        keep(model.sleep, request.keep_alive)
        return self._respond_from(exchange, request, generation)

    async def _answered_without_text(self, exchange: Exchange, request: _R) -> bool:
        if request.keep_alive is not None and not seconds_of(request.keep_alive):
            message = "keep_alive: the other server decides how long it keeps its model."
            raise UnsupportedError(message, param="keep_alive")
        if self._is_empty(request):
            await self._answer_empty(exchange, request, "load")
            return True
        return False

    def _respond_from(self, exchange: Exchange, request: _R, generation: Generation | OtherAnswer) -> Awaitable[None]:
        if request.stream is False:
            return self._answer(exchange, request, generation)
        lines = Lines(request.model, exchange.context, generation.usage, is_chat=self.is_chat)
        return stream(exchange, generation, lines, ending=lines.ending, content_type=_JSON_LINES, early=lines.heartbeat)

    async def _answer(self, exchange: Exchange, request: _R, generation: Generation | OtherAnswer) -> None:
        answer = Answer(request.model, exchange.context, generation.usage, is_chat=self.is_chat)
        async for deltas in generation:
            for delta in deltas:
                answer.add(delta)
        await exchange.respond(200, answer.end(answer.taken()))

    async def _answer_at_once(self, exchange: Exchange, request: _R) -> bool:
        """An empty request asks for the model to be loaded, or with `keep_alive` 0 for the opposite."""
        if not self._is_empty(request):
            return False
        name = self._model_name(request)
        exchange.context.principal.require_model(name)
        model, _ = self._dataplane.models.find(name, context=exchange.context)
        leaves = request.keep_alive is not None and not seconds_of(request.keep_alive)
        with model.in_flight:
            if not leaves:
                await model.sleep.awake()
            keep(model.sleep, request.keep_alive)
        await self._answer_empty(exchange, request, "unload" if leaves else "load")
        return True

    async def _answer_empty(self, exchange: Exchange, request: _R, reason: str) -> None:
        empty = {"message": {"role": "assistant", "content": ""}} if self.is_chat else {"response": ""}
        body = {"model": request.model, "created_at": now(), **empty, "done": True, "done_reason": reason}
        await exchange.respond(200, msgspec.json.encode(body))

    def _model_name(self, request: _R) -> str:
        others = self._settings.text_models.by_name
        return model_name(request.model, lambda name: name in others or self._dataplane.models.knows(name))

    def _renamed(self, request: _R, model: str) -> _R:
        return msgspec.structs.replace(request, model=model)

    @abstractmethod
    def _is_empty(self, request: _R) -> bool: ...


class Chat(_Endpoint[ChatRequest]):
    schema = ChatRequest
    is_chat = True

    def _is_empty(self, request: ChatRequest) -> bool:
        return not request.messages

    async def _generate_request(self, request: ChatRequest, context: RequestContext) -> WantedText:
        name = self._model_name(request)
        chat = openai_chat(request, name, request.tools, self._dataplane.model(name, context))
        return await chat_generation(
            self._dataplane, self._settings, chat, template_messages(request.messages), context
        )

    async def _other_chat(self, request: ChatRequest, context: RequestContext) -> OtherChat:
        chat = openai_chat(request, self._model_name(request), request.tools)
        return other_chat(chat, template_messages(request.messages))


class Generate(_Endpoint[GenerateRequest]):
    """A prompt is the one message of a chat, unless it is `raw`, has a `suffix`, or the model has no chat template."""

    schema = GenerateRequest
    is_chat = False

    def _is_empty(self, request: GenerateRequest) -> bool:
        return not request.prompt

    async def _generate_request(self, request: GenerateRequest, context: RequestContext) -> WantedText:
        name = self._model_name(request)
        model = self._dataplane.model(name, context)
        if request.raw or request.suffix or not model.has_chat_template:
            if request.system:
                raise InvalidRequestError("system: this prompt goes to the model as it is.", param="system")
            completion = openai_completion(request, name)
            return completion_generate_request(completion, model, self._settings, context)
        chat = openai_chat(request, name, None, model)
        return await chat_generation(self._dataplane, self._settings, chat, _messages(request), context)

    async def _other_chat(self, request: GenerateRequest, context: RequestContext) -> OtherChat:
        for name in ("raw", "suffix"):
            if getattr(request, name):
                raise UnsupportedError(f"{name}: models of other servers are asked by chats.", param=name)
        return other_chat(openai_chat(request, self._model_name(request), None), _messages(request))


def _messages(request: GenerateRequest) -> list[dict[str, Any]]:
    system = [Message("system", request.system)] if request.system else []
    return template_messages([*system, Message("user", request.prompt)])
