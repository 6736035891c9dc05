"""Echo of text completions: the prompt before the generated text, and its log probabilities before theirs."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.gateway.llm.dataplane import Generation, TokenLogprob
from penstock.gateway.openai.logprobs import FirstToken


class Echo:
    """The prompts of one call, as they are repeated in front of its choices."""

    def __init__(self, generation: Generation, prompts: Sequence[str | list[int]], n: int) -> None:
        self._generation = generation
        self._prompts = prompts
        self._n = n

    def text(self, index: int) -> str:
        """The prompt as given; token ids as the text they stand for."""
        number = index // self._n
        prompt = self._prompts[number]
        return prompt if isinstance(prompt, str) else self._generation.prompt_text(number)

    def logprobs(self, index: int) -> list[TokenLogprob]:
        """One entry for each prompt token."""
        number = index // self._n
        known = self._generation.prompt_logprobs
        text, data = self._generation.first_token(number)
        rest = [entry for entry in known[number] if entry is not None] if known is not None else []
        return [FirstToken(text, self._generation.prompt_token_ids[number][0], 0.0, list(data), []), *rest]
