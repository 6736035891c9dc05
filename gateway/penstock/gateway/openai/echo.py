"""Echo of text completions: the prompt before the generated text, and its log probabilities before theirs."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.gateway.dataplane import Generation, TokenLogprob
from penstock.gateway.openai.logprobs import FirstToken


class Echo:
    """The prompts of one call, as they are repeated in front of its choices."""

    def __init__(self, generation: Generation, prompts: Sequence[str | list[int]], n: int) -> None:
        self._generation = generation
        self._prompts = prompts
        self._n = n

    def text(self, index: int) -> str:
        """The prompt as given; token ids by the texts of their tokens."""
        prompt = self._prompts[index // self._n]
        return prompt if isinstance(prompt, str) else _joined(self._entries(index)).decode(errors="replace")

    def logprobs(self, index: int) -> list[TokenLogprob]:
        """One entry for each prompt token. The first one's text is what the others leave of the prompt."""
        prompt = self._prompts[index // self._n]
        rest = self._entries(index)
        whole = prompt.encode() if isinstance(prompt, str) else b""
        tail = _joined(rest)
        first = whole[: len(whole) - len(tail)] if whole.endswith(tail) else b""
        return [FirstToken(first.decode(errors="replace"), -1, 0.0, list(first), []), *rest]

    def _entries(self, index: int) -> list[TokenLogprob]:
        known = self._generation.prompt_logprobs
        entries = known[index // self._n] if known is not None else []
        return [entry for entry in entries if entry is not None]


def _joined(entries: list[TokenLogprob]) -> bytes:
    return b"".join(bytes(entry.bytes) for entry in entries)
