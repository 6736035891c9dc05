"""What a text completion call shows of its generation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import msgspec

from penstock.gateway.generating.streams import Collected
from penstock.gateway.llm.dataplane import ChoiceDelta, GenerateRequest, Generation, TokenLogprob, Usage
from penstock.gateway.openai.echo import Echo
from penstock.gateway.openai.logprobs import completion_logprobs, prompt_logprobs
from penstock.gateway.openai.objects import CompletionChoice, CompletionLogprobs, PromptLogprob
from penstock.gateway.openai.schemas import CompletionRequest


class CompletionResult:
    """A generation as the caller wants to see it: with the prompts echoed, and without the one token that an engine
    makes even where none was asked for."""

    def __init__(self, request: CompletionRequest, wanted: GenerateRequest, generation: Generation) -> None:
        self._request = request
        self._n = wanted.n
        shown = wanted.prompts if wanted.truncation is None else generation.prompt_token_ids
        self._echo = Echo(generation, shown, wanted.n) if request.echo else None
        self._only_echo = request.max_tokens == 0
        self._echoed: set[int] = set()
        self._named: set[int] = set()
        self.generation = generation
        self.choices = len(wanted.prompts) * wanted.n

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
