"""Log probabilities of tokens, with the tokens as text."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass

from penstock.engines.contract.messages import TokenLogprobs
from penstock.tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Candidate:
    """One token with its logprob, as text."""

    token: str
    token_id: int
    logprob: float
    bytes: list[int]
    """The token's UTF-8 bytes, which may be a part of a character."""


@dataclass(frozen=True, slots=True)
class TokenLogprob(Candidate):
    top: list[Candidate]
    """The likeliest tokens at this position, best first; as many as were asked for."""
    rank: int = 0
    """1 for the likeliest token of the vocabulary."""
    offset: int = 0
    """Where its text begins in the answer's text, in characters; negative in the prompt, where that stands before the
    answer. A token that continues a character begins where the character does."""


class TextOffsets:
    """Where the texts of an answer's tokens begin in its text."""

    def __init__(self, tokenizer: Tokenizer, is_silent: Callable[[int], bool]) -> None:
        """`is_silent`: whether a token, such as a skipped special one, is not in the text."""
        self._tokenizer = tokenizer
        self._is_silent = is_silent
        self._held = b""
        """Of the tokens whose text is not final."""
        self.end = 0
        """Where the final text ends."""

    def take(self, token_id: int, text: str) -> int:
        """Where the next token's text begins. `text`: what is final since it came."""
        start = self.end + len(whole_characters(self._held))
        data = b"" if self._is_silent(token_id) else self._tokenizer.token_bytes(token_id)
        if not text:
            self._held += data
            return start
        self.end += len(text)
        self._held = b""
        own = whole_characters(data)
        # Where a run of bytes was no text, or a mark was stripped, the bytes do not tell how long their text is.
        return self.end - len(own) if own.encode() == data and text.endswith(own) else start


def whole_characters(data: bytes) -> str:
    """The text of UTF-8 without the part of a character at its end."""
    return codecs.utf_8_decode(data, "replace", False)[0]


def with_text(entry: TokenLogprobs, tokenizer: Tokenizer, offset: int = 0) -> TokenLogprob:
    def candidate(token_id: int, logprob: float) -> Candidate:
        data = tokenizer.token_bytes(token_id)
        return Candidate(tokenizer.token_text(token_id), token_id, logprob, list(data))

    own = candidate(entry.token_id, entry.logprob)
    top = [candidate(token_id, logprob) for token_id, logprob in entry.top]
    return TokenLogprob(own.token, own.token_id, own.logprob, own.bytes, top, entry.rank, offset)
