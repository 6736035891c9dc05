"""Shadows of requests that generate: the tokens or texts of an answer, and what a shadow answers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from penstock.engines.errors import EngineError, OverloadedError
from penstock.gateway.configuration.traffic_rules import Target
from penstock.gateway.models.language.choice_output import ChoiceDelta
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.language.generate_request import GenerateRequest
from penstock.gateway.models.language.models import NameHolder
from penstock.gateway.models.language.prompts import ChatValues
from penstock.gateway.models.traffic.shadows import Result, Shadow
from penstock.gateway.models.traffic.table import RoutedCall, TargetChoice
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.record import Outcome
from penstock.gateway.transports.http.inner_request import InnerRequest
from penstock.tokenizers import Tokenizer

_MOST_TEXT = 1 << 20
"""Characters of an answer that are kept; a longer one is not compared."""
_NOT_FOR_SHADOWS = ("stream_options", "store", "metadata")
AskInside = Callable[[str, bytes, TargetChoice, str], InnerRequest]
"""A request by an API, with a choice made before, in the name of a tenant."""
Resolve = Callable[[Target, RequestContext], Awaitable[NameHolder]]


@dataclass(slots=True)
class Tokens:
    """The answer of a language model, as its tokenizer has it: what stages and stop strings show of it does not
    matter here."""

    tokenizer: Tokenizer
    choices: list[list[int]]

    def add(self, deltas: Sequence[ChoiceDelta]) -> None:
        for delta in deltas:
            self.choices[delta.index] += delta.token_ids

    def texts(self) -> list[str]:
        return [self.tokenizer.decode(tokens, skip_special_tokens=False) for tokens in self.choices]


@dataclass(slots=True)
class Texts:
    """The answer of a model as clients see it, without its thoughts and calls."""

    choices: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    size: int = 0

    def add(self, deltas: Sequence[ChoiceDelta]) -> None:
        for delta in deltas:
            self.hear(delta.index, delta.text)

    def hear(self, index: int, text: str) -> None:
        self.size += len(text)
        if self.size <= _MOST_TEXT:
            self.choices[index].append(text)

    def texts(self) -> list[str]:
        return ["".join(text) for _, text in sorted(self.choices.items())]


class LanguageCall:
    """Implements AcceptedCall."""

    def __init__(
        self, call: RoutedCall, shadow: Shadow[Tokens | Texts] | None = None, kept: Tokens | Texts | None = None
    ) -> None:
        """`kept` is compared with what the shadow answers."""
        self._call = call
        self._shadow = shadow
        self._kept = kept
        self.watched = shadow is not None

    def took(self, deltas: list[ChoiceDelta]) -> None:
        if self._kept is not None:
            self._kept.add(deltas)

    def listener(self) -> Callable[[int, str], None] | None:
        """As `RoutedName` has it."""
        if self._shadow is None:
            return None
        self._kept = texts = Texts()
        return texts.hear

    def responded(self, seconds: float | None = None) -> None:
        self._call.responded(seconds)

    def end(self, outcome: Outcome) -> None:
        self._call.end(outcome)
        if self._shadow is not None:
            whole = outcome is Outcome.OK and not (isinstance(self._kept, Texts) and self._kept.size > _MOST_TEXT)
            self._shadow.answered(self._kept if whole else None)


Begun = tuple[Shadow[Tokens | Texts], Tokens | Texts] | tuple[()]
"""A shadow, and what is kept of the answer to compare; or neither."""


def begin_shadow(
    dataplane: DataPlane, resolve: Resolve, choice: TargetChoice, request: GenerateRequest, tokenizer: Tokenizer
) -> Begun:
    """Where a model of this server is the shadow of another one."""
    shadows = choice.public.shadows
    if shadows is None or not shadows.wants(choice.public.key(request.context)):
        return ()
    context = shadows.context(request.context.tenant)
    ask = partial(_ask, dataplane, resolve, shadows.rule, context, request, choice.chat)
    shadow = shadows.begin(context, ask, _same)
    if shadow is None:
        return ()
    if request.params.is_random and request.params.seed is None:
        shadow.answered(None)  # no two answers would be alike
    return shadow, Tokens(tokenizer, [[] for _ in range(len(request.prompts) * request.n)])


async def _ask(
    dataplane: DataPlane,
    resolve: Resolve,
    target: Target,
    context: RequestContext,
    request: GenerateRequest,
    chat: tuple[ChatValues, bool] | None,
) -> Tokens | Texts:
    model, adapter = await resolve(target, context)
    prompts, images = request.prompts, request.images
    if chat is not None:
        prompt = await dataplane.chat_prompt_on(
            model, chat[0], context, cut=chat[1], tenant=request.tenant, cache_salt=request.cache_salt
        )
        prompts, images = [prompt.token_ids], prompt.images
    copy = replace(request, prompts=prompts, images=images, context=context, stages=(), pulse=None)
    tokens = Tokens(model.tokenizer, [[] for _ in range(len(prompts) * request.n)])
    name = None if adapter is None else adapter.name
    async with await dataplane.generate_on(model, copy, adapter=name) as generation:
        async for deltas in generation:
            tokens.add(deltas)
    return tokens


async def _same(answered: Tokens | Texts, other: Tokens | Texts) -> bool:
    return await asyncio.to_thread(lambda: answered.texts() == other.texts())


def begin_text_shadow(choice: TargetChoice, context: RequestContext, ask_inside: AskInside | None) -> Begun:
    """Where one of both is a model of another server: it is asked by the same API, whatever the client's was."""
    shadows = choice.public.shadows
    if shadows is None or choice.is_shadow or not shadows.wants(choice.public.key(context)):
        return ()
    if choice.body is None or ask_inside is None:
        shadows.results[Result.SKIPPED] += 1
        return ()
    api, body = choice.body
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        sampling = msgspec.json.decode(body, type=_Sampling)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the client's own request tells what is wrong
        shadows.results[Result.UNCOMPARED] += 1
        return ()
    kept = {name: value for name, value in fields.items() if name not in _NOT_FOR_SHADOWS}
    target = TargetChoice(choice.public, shadows.rule, is_shadow=True)
    request = ask_inside(api, msgspec.json.encode({**kept, "stream": False}), target, context.tenant)
    shadow = shadows.begin(request.context, partial(_ask_text, request), _same)
    if shadow is None:
        return ()
    if sampling.temperature != 0 and sampling.seed is None:
        shadow.answered(None)  # no two answers would be alike
    return shadow, Texts()


class _Sampling(msgspec.Struct):
    temperature: Any = None
    seed: Any = None


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    message: _Message | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


async def _ask_text(request: InnerRequest) -> Tokens | Texts:
    """Raises OverloadedError, EngineError."""
    await request.run()
    answer = request.answer
    if answer.status in (429, 503):
        raise OverloadedError("the shadow has no room")
    if answer.status != 200:
        raise EngineError(f"the shadow's answer has the status {answer.status}")
    texts = Texts()
    for choice in msgspec.json.decode(answer.body, type=_Answer).choices:
        texts.hear(choice.index, choice.text or (choice.message and choice.message.content) or "")
    return texts
