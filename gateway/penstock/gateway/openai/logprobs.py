"""Log probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.gateway.llm.dataplane import Candidate, TokenLogprob
from penstock.gateway.openai.objects import (
    ChatLogprobs,
    CompletionLogprobs,
    ContentLogprob,
    PromptLogprob,
    TopLogprob,
)

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not know (vLLM's value)."""


class FirstToken(TokenLogprob):
    """A prompt's first token: nothing stands before it, so it has no probability."""


def chat_logprobs(entries: Sequence[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs([_content(entry) for entry in entries])


def completion_logprobs(entries: Sequence[TokenLogprob], begin: int) -> CompletionLogprobs:
    """The legacy shape: parallel lists. `begin`: where the answer begins in the choice's text, behind its prompt."""
    result = CompletionLogprobs([], [], [], [])
    for entry in entries:
        result.text_offset.append(begin + entry.offset)
        result.tokens.append(entry.token)
        if isinstance(entry, FirstToken):
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
        else:
            candidates: list[Candidate] = [*entry.top, entry]
            result.token_logprobs.append(_finite(entry.logprob))
            result.top_logprobs.append({each.token: _finite(each.logprob) for each in candidates})
    return result


def prompt_logprobs(entries: Sequence[TokenLogprob | None], count: int) -> list[dict[int, PromptLogprob] | None]:
    """vLLM's shape: of each prompt token, itself and the `count` likeliest by their ids; null for the first."""
    return [None if entry is None else _at_a_place(entry, count) for entry in entries]


def _at_a_place(entry: TokenLogprob, count: int) -> dict[int, PromptLogprob]:
    likeliest = {
        each.token_id: PromptLogprob(_finite(each.logprob), rank, each.token)
        for rank, each in enumerate(entry.top[:count], 1)
    }
    return {entry.token_id: PromptLogprob(_finite(entry.logprob), entry.rank, entry.token)} | likeliest


def _content(entry: TokenLogprob) -> ContentLogprob:
    top = [TopLogprob(each.token, _finite(each.logprob), each.bytes) for each in entry.top]
    return ContentLogprob(entry.token, _finite(entry.logprob), entry.bytes, top)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
