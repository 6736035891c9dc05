"""A request that generates, with a target, and what is kept of its answer where a shadow answers it as well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from penstock.gateway.configuration.traffic_rules import Target
from penstock.gateway.front.context import Principal, RequestContext
from penstock.gateway.front.record import Outcome
from penstock.gateway.llm.chat_texts import ChatValues
from penstock.gateway.llm.choice_output import ChoiceDelta
from penstock.gateway.llm.dataplane import DataPlane
from penstock.gateway.llm.generate_request import GenerateRequest
from penstock.gateway.llm.models import NameHolder
from penstock.gateway.traffic.shadows import Shadow
from penstock.gateway.traffic.table import PublicName, RoutedCall
from penstock.tokenizers import Tokenizer

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


class LanguageCall:
    """Implements AcceptedCall."""

    def __init__(self, call: RoutedCall, shadow: tuple[Shadow[Tokens], int] | None, tokenizer: Tokenizer) -> None:
        """`shadow` comes with the number of choices."""
        self._call = call
        self._shadow = None if shadow is None else shadow[0]
        self._tokens = None if shadow is None else Tokens(tokenizer, [[] for _ in range(shadow[1])])
        self.watched = shadow is not None

    def took(self, deltas: list[ChoiceDelta]) -> None:
        if self._tokens is not None:
            self._tokens.add(deltas)

    def responded(self) -> None:
        self._call.responded()

    def end(self, outcome: Outcome) -> None:
        self._call.end(outcome)
        if self._shadow is not None:
            self._shadow.answered(self._tokens if outcome is Outcome.OK else None)


def begin_shadow(
    dataplane: DataPlane,
    resolve: Resolve,
    public: PublicName,
    request: GenerateRequest,
    chat: tuple[ChatValues, bool] | None,
) -> tuple[Shadow[Tokens], int] | None:
    """With the number of choices; None where this request has none. `chat`: what its prompt was rendered from."""
    shadows = public.shadows
    if shadows is None or not shadows.wants(public.key(request.context)):
        return None
    rule = shadows.rule
    shadow = shadows.begin(partial(_ask, dataplane, resolve, rule, rule.timeout_s, request, chat), _same)
    if shadow is None:
        return None
    if request.params.is_random and request.params.seed is None:
        shadow.answered(None)  # no two answers would be alike
    return shadow, len(request.prompts) * request.n


async def _ask(
    dataplane: DataPlane,
    resolve: Resolve,
    target: Target,
    seconds: float,
    request: GenerateRequest,
    chat: tuple[ChatValues, bool] | None,
) -> Tokens:
    """The shadow's answer, computed while no other request is."""
    principal = Principal(tenant=request.context.tenant)
    context = RequestContext(principal=principal, background=True, deadline=time.monotonic() + seconds)
    try:
        model, adapter = await resolve(target, context)
        prompts = request.prompts
        if chat is not None:
            prompts = [(await dataplane.chat_prompt_on(model, chat[0], context, cut=chat[1])).token_ids]
        wanted = replace(request, prompts=prompts, context=context, stages=(), pulse=None)
        tokens = Tokens(model.tokenizer, [[] for _ in range(len(prompts) * request.n)])
        name = None if adapter is None else adapter.name
        async with await dataplane.generate_on(model, wanted, adapter=name) as generation:
            async for deltas in generation:
                tokens.add(deltas)
        return tokens
    finally:
        context.end()


async def _same(answered: Tokens, other: Tokens) -> bool:
    return await asyncio.to_thread(lambda: answered.texts() == other.texts())
