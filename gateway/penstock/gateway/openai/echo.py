"""Echo of text completions: the prompt before the generated text, and its log probabilities before theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.gateway.llm.dataplane import Generation, TokenLogprob
from penstock.gateway.llm.token_logprobs import whole_characters
from penstock.gateway.openai.logprobs import FirstToken

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
    found = text.find(shown, begin, begin + len(shown) + lost + _FARTHEST) if lost else -1
    return None if found < 0 else (found, found + len(shown))
