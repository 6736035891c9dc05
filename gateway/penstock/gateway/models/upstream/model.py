"""A model that other servers have, as the routes of this server ask it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import TypeVar, cast

import msgspec

from penstock.engines.errors import (
    AuthenticationError,
    DeadlineExceededError,
    InvalidRequestError,
    PenstockError,
    UnsupportedError,
)
from penstock.gateway.configuration.upstream_settings import Api, UpstreamSettings
from penstock.gateway.errors import UpstreamUnavailableError
from penstock.gateway.models.entries import UpstreamAnswer, UpstreamChat
from penstock.gateway.models.language.adapters import CallCounter
from penstock.gateway.models.language.generation import Usage
from penstock.gateway.models.upstream.answer_reading import AnswerReader, HeldAnswer, HeldAnswers
from penstock.gateway.models.upstream.attempts import CountedAnswer
from penstock.gateway.models.upstream.chat_answer import ChatAnswer
from penstock.gateway.models.upstream.fleet import Fleet
from penstock.gateway.models.upstream.prompt_tokens import PromptEncoder
from penstock.gateway.models.upstream.relay import SilenceBounds, pass_on, relay
from penstock.gateway.models.upstream.request_writing import PATHS, RequestWriter, UpstreamRequest
from penstock.gateway.requests.context import RequestContext, until
from penstock.gateway.requests.record import Stage
from penstock.gateway.transports.http.exchange import Exchange

FindFallback = Callable[[str], "UpstreamModel | None"]
"""None: a model of this server has the name, or none has."""
IsOwn = Callable[[str, Api], bool]
"""Whether a model of this server has the name, and can be asked so."""

_T = TypeVar("_T")
_REFUSAL = (
    "The model `{name}` is another server's. It can be asked by chats of every API, /v1/completions and "
    "/v1/embeddings. Only that server could do this."
)
_LATE = "The request's time was over."
_CALLERS_ERRORS = (InvalidRequestError, DeadlineExceededError, AuthenticationError)
"""Errors that no other model would answer differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all models of other servers share."""

    find_fallback: FindFallback
    is_own: IsOwn
    held: HeldAnswers
    heartbeat_s: float
    request_timeout: float | None


class UpstreamModel:
    """Implements Upstream."""

    owner = "upstream"
    folder = ""
    gives_way = False

    def __init__(
        self,
        settings: UpstreamSettings,
        fleet: Fleet,
        writer: RequestWriter,
        surroundings: Surroundings,
        encoder: PromptEncoder | None = None,
    ) -> None:
        """`encoder`: None where prompts are told apart by their text."""
        self.settings = settings
        self.name = settings.name
        self.apis = settings.apis
        self.root = settings.model or settings.name
        self.refusal = _REFUSAL
        self.created = int(time.time())
        self.fleet = fleet
        self.calls = CallCounter()
        self.fell_back: Counter[str] = Counter()
        """Requests, by the model that has answered instead."""
        self.tokens: Counter[str] = Counter()
        """prompt, completion."""
        self._writer = writer
        self._surroundings = surroundings
        self._encoder = encoder

    def probe_headers(self) -> list[tuple[str, str]]:
        return self._writer.probe_headers()

    async def answer(self, exchange: Exchange, api: str, body: bytes) -> bytes | None:
        context = exchange.context
        known_api = cast("Api", api)
        request = self._admitted(exchange, known_api, body)
        try:
            async with until(context.deadline, DeadlineExceededError(_LATE)):
                await self._first_good(
                    exchange, known_api, lambda model: model._answer_itself(exchange, request, known_api)
                )
        except _OwnModel as own:
            context.pay_tokens(-request.expected_tokens)  # that model does it, too
            return request.renamed(own.name)
        return None

    @asynccontextmanager
    async def chat(
        self, exchange: Exchange, chat: UpstreamChat, *, pulse: float | None
    ) -> AsyncIterator[UpstreamAnswer | str]:
        """As Upstream has it."""
        context = exchange.context
        body = msgspec.json.encode({**chat.fields, "model": self.name, "stream": True})
        request = self._admitted(exchange, "chat", body)

        async def begun(model: UpstreamModel) -> ChatAnswer:
            counted = await model.begin(context, request, "chat", context.record.model)
            bounds = SilenceBounds(model.settings.idle_timeout, pulse or 0)
            answer = ChatAnswer(counted, context, bounds, show_reasoning=chat.show_reasoning)
            try:
                return await answer.begin()
            except BaseException as error:
                answer.close()
                if isinstance(error, PenstockError):
                    context.record.usage = None
                raise

        async with until(context.deadline, DeadlineExceededError(_LATE)):
            try:
                answer = await self._first_good(exchange, "chat", begun)
            except _OwnModel as own:
                context.pay_tokens(-request.expected_tokens)
                yield own.name
                return
            with closing(answer):
                yield answer

    def _admitted(self, exchange: Exchange, api: Api, body: bytes) -> UpstreamRequest:
        """Raises PenstockError."""
        context = exchange.context
        context.record.model = context.require_model(self.name)
        if api not in self.apis:
            raise self._not_offered(api)
        request = UpstreamRequest(body, api)
        exchange.read_deadline()
        timeout = self._surroundings.request_timeout
        if timeout is not None and not context.background:
            context.limit(timeout)
        context.pay_tokens(request.expected_tokens)
        return request

    def _not_offered(self, api: Api) -> UnsupportedError:
        offered = ", ".join(f"/v1/{PATHS[api]}" for api in self.apis)
        return UnsupportedError(
            f"The model `{self.name}` of another server cannot be asked by /v1/{PATHS[api]}, only by {offered}.",
            param="model",
        )

    async def _first_good(self, exchange: Exchange, api: Api, ask: Callable[[UpstreamModel], Awaitable[_T]]) -> _T:
        """Of this model, or where it cannot of the first of its fallbacks that can. Raises PenstockError, _OwnModel."""
        try:
            return await ask(self)
        except PenstockError as error:
            if exchange.started or isinstance(error, _CALLERS_ERRORS):
                raise
            first_error = error
        context = exchange.context
        target = context.record.target
        for name in self.settings.fallbacks:
            if not context.principal.may_use(name):
                continue
            other = self._surroundings.find_fallback(name)
            if other is None and self._surroundings.is_own(name, api):
                self._falls_back(context, name)
                raise _OwnModel(name)
            if other is None or api not in other.apis:
                continue
            try:
                self._falls_back(context, name)
                return await ask(other)
            except PenstockError as error:
                if exchange.started or isinstance(error, _CALLERS_ERRORS):
                    raise
        context.record.target = target
        raise first_error

    def _falls_back(self, context: RequestContext, name: str) -> None:
        context.record.target = name
        self.fell_back[name] += 1

    async def _answer_itself(self, exchange: Exchange, request: UpstreamRequest, api: Api) -> None:
        """Raises PenstockError."""
        counted = await self.begin(exchange.context, request, api, exchange.context.record.model)
        bounds = SilenceBounds(self.settings.idle_timeout, self._surroundings.heartbeat_s)
        try:
            if request.streams:
                await relay(exchange, counted.answer, counted.reader, bounds, shows_usage=request.shows_usage)
            else:
                await pass_on(exchange, counted.answer, counted.reader, bounds, has_choices=api != "embeddings")
        except PenstockError as error:
            counted.failed(error)
            if not exchange.started:
                exchange.context.record.usage = None
            raise
        finally:
            counted.end()

    async def begin(self, context: RequestContext, request: UpstreamRequest, api: Api, shown: str) -> CountedAnswer:
        """An answer that has begun, and is to be ended. `shown` is the public name in it. Raises PenstockError."""
        if self.calls.calls >= self.settings.max_in_flight:
            message = f"The model `{self.name}` has {self.settings.max_in_flight} requests in flight, its most."
            raise UpstreamUnavailableError(message, retry_after=1)
        context.record.enter(Stage.UPSTREAM)
        usage = context.record.usage = Usage(prompt_tokens=request.prompt_estimate)
        self.calls.begin()
        try:
            tokens = () if self._encoder is None else await self._encoder.tokens(request, api)
            question = self._writer.question(context, request, api, tokens)
            answer = await self.fleet.ask(question)
        except BaseException as error:
            self.calls.end()
            if isinstance(error, PenstockError):  # a client that gave up pays for what it asked
                context.record.usage = None
            raise
        held = HeldAnswer(self._surroundings.held)
        listener = None if context.routed is None else context.routed.listener()
        reader = AnswerReader(shown, usage, question.redact, held, choices=request.choices, listener=listener)
        return CountedAnswer(answer, reader, self.calls, self.tokens)


class _OwnModel(Exception):
    """A model of this server is to answer."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name
