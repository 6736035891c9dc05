"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from penstock.gateway.apis.openai.frames import Frames
from penstock.gateway.apis.openai.objects import (
    CompletionChoice,
    CompletionLogprobs,
    FirstToken,
    PromptLogprob,
    completion_logprobs,
    new_head,
    prompt_logprobs,
    running_usage,
    spliced,
    usage_object,
)
from penstock.gateway.apis.openai.schemas import COMPLETION, CompletionRequest, StreamOptions
from penstock.gateway.apis.openai.validation import completion_generate_request
from penstock.gateway.generating.endpoint import GeneratingEndpoint
from penstock.gateway.generating.request_reading import JsonBody, parse
from penstock.gateway.generating.streams import Collected, collect, stream
from penstock.gateway.models.entries import Kind
from penstock.gateway.models.language.choice_output import whole_characters
from penstock.gateway.models.language.dataplane import ChoiceDelta, GenerateRequest, Generation, TokenLogprob, Usage
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.exchange import Exchange


class CompletionResult:
    """A generation as the caller wants to see it: with the prompts echoed, and without the one token that an engine
    makes even where none was asked for."""

    def __init__(self, request: CompletionRequest, text_request: GenerateRequest, generation: Generation) -> None:
        self._request = request
        self._n = text_request.n
        shown = text_request.prompts if text_request.truncation is None else generation.prompt_token_ids
        self._echo = Echo(generation, shown, text_request.n) if request.echo else None
        self._only_echo = request.max_tokens == 0
        self._echoed: set[int] = set()
        self._named: set[int] = set()
        self.generation = generation
        self.choices = len(text_request.prompts) * text_request.n

    @property
    def usage(self) -> Usage:
        usage = self.generation.usage
        return replace(usage, completion_tokens=0) if self._only_echo else usage

    def deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        return self.generation if self._echo is None else self._with_prompts(self._echo)

    async def _with_prompts(self, echo: Echo) -> AsyncIterator[list[ChoiceDelta]]:
        async for batch in self.generation:
            deltas = [self._with_prompt(echo, delta) for delta in batch]
            shown = [delta for delta in deltas if delta is not None]
            if shown or not batch:
                yield shown

    def _with_prompt(self, echo: Echo, delta: ChoiceDelta) -> ChoiceDelta | None:
        """The prompt goes before the first delta of a choice; after that, the others pass as they are."""
        if delta.index in self._echoed:
            return None if self._only_echo else delta
        self._echoed.add(delta.index)
        prompt = echo.text(delta.index)
        before = echo.logprobs(delta.index) if self._request.logprobs is not None else []
        if self._only_echo:
            return ChoiceDelta(delta.index, prompt, [], "length", logprobs=before)
        return replace(delta, text=prompt + delta.text, logprobs=[*before, *(delta.logprobs or ())])

    def token_ids(self, delta: ChoiceDelta) -> dict[str, list[int]]:
        """`token_ids` of each chunk, and `prompt_token_ids` in a choice's first."""
        fields = {"token_ids": delta.token_ids}
        if delta.index not in self._named:
            self._named.add(delta.index)
            fields["prompt_token_ids"] = self.generation.prompt_token_ids[delta.index // self._n]
        return fields

    def logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> CompletionLogprobs:
        return completion_logprobs(entries, 0 if self._echo is None else len(self._echo.text(index)))

    def choice(self, index: int, collected: Collected) -> CompletionChoice:
        request = self._request
        ids = bool(request.return_token_ids)
        prompt_ids = self.generation.prompt_token_ids
        return CompletionChoice(
            index=index,
            text=collected.text,
            logprobs=self.logprobs(index, collected.logprobs) if request.logprobs is not None else None,
            finish_reason=collected.finish_reason,
            stop_reason=collected.stop_reason,
            token_ids=collected.token_ids if ids else msgspec.UNSET,
            prompt_token_ids=prompt_ids[index // self._n] if ids else msgspec.UNSET,
            prompt_logprobs=self._prompt_logprobs(index // self._n),
        )

    def _prompt_logprobs(self, prompt: int) -> list[dict[int, PromptLogprob] | None] | msgspec.UnsetType:
        count, known = self._request.prompt_logprobs, self.generation.prompt_logprobs
        return msgspec.UNSET if count is None or known is None else prompt_logprobs(known[prompt], count)


_FARTHEST = 256
"""Characters of a prompt in one place that no token may have: what normalization leaves out, or a run of unknown
characters, for which one token stands."""


class Echo:
    """The prompts of one call, as they are repeated in front of its choices."""

    def __init__(self, generation: Generation, prompts: Sequence[str | list[int]], n: int) -> None:
        self._generation = generation
        self._prompts = prompts
        self._n = n
        self._texts: dict[int, str] = {}
        """By prompt, those that were shown."""

    def text(self, index: int) -> str:
        """The prompt as given; token ids as the text they stand for."""
        number = index // self._n
        if number not in self._texts:
            prompt = self._prompts[number]
            self._texts[number] = prompt if isinstance(prompt, str) else self._generation.prompt_text(number)
        return self._texts[number]

    def logprobs(self, index: int) -> list[TokenLogprob]:
        """One entry for each prompt token."""
        number, prompt = index // self._n, self.text(index)
        known = self._generation.prompt_logprobs
        text, data = self._generation.first_token(number)
        rest = [entry for entry in known[number] if entry is not None] if known is not None else []
        first = FirstToken(text, self._generation.prompt_token_ids[number][0], 0.0, list(data), [])
        entries: list[TokenLogprob] = [first, *rest]
        starts = _starts(entries, prompt)
        return [replace(entry, offset=start - len(prompt)) for entry, start in zip(entries, starts, strict=True)]


def _starts(entries: Sequence[TokenLogprob], text: str) -> list[int]:
    """Where each token begins in the prompt. One that is not in it, such as the one that the tokenizer puts first,
    begins where the next one does."""
    starts: list[int] = []
    end, lost, held = 0, 0, b""
    for entry in entries:
        held += bytes(entry.bytes)
        shown = whole_characters(held)
        place = _place(shown, text, end, lost)
        if place is None:
            starts.append(end)
            lost, held = lost + len(shown), b""
        else:
            starts.append(place[0])
            end, lost = place[1], 0
            held = held[len(shown.encode()) :]
    return starts


def _place(shown: str, text: str, begin: int, lost: int) -> tuple[int, int] | None:
    """(begin, end) of a token's text. `lost`: the length of what the tokens before it have instead of the text from
    `begin` on. None: it is not there."""
    if text.startswith(shown, begin):
        return begin, begin + len(shown)
    bare = shown.removeprefix(" ")
    if text.startswith(bare, begin):  # a tokenizer marks the beginning of a word, though there is no space
        return begin, begin + len(bare)
    place = text.find(shown, begin, begin + len(shown) + lost + _FARTHEST) if lost else -1
    return None if place < 0 else (place, place + len(shown))


class Completions(GeneratingEndpoint[CompletionRequest]):
    kind = Kind.COMPLETIONS
    passes_body = True

    def _parse(self, body: JsonBody) -> CompletionRequest:
        return parse(body, CompletionRequest, COMPLETION)

    def _model_name(self, request: CompletionRequest) -> str:
        return request.model

    async def _generate_request(self, request: CompletionRequest, context: RequestContext) -> GenerateRequest:
        model = self._dataplane.model(request.model, context)
        return completion_generate_request(request, model, self._settings, context)

    def _respond(
        self, exchange: Exchange, request: CompletionRequest, text_request: GenerateRequest, generation: Generation
    ) -> Awaitable[None]:
        respond = self._stream if request.stream else self._answer
        return respond(exchange, request, CompletionResult(request, text_request, generation))

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
        choices = [result.choice(index, choice) for index, choice in enumerate(collected)]
        body = spliced(head, choices=choices, usage=usage_object(result.usage))
        await exchange.respond(200, body)
