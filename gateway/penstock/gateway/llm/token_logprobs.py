"""Log probabilities of tokens, with the tokens as text."""

from __future__ import annotations

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


def with_text(entry: TokenLogprobs, tokenizer: Tokenizer) -> TokenLogprob:
    def candidate(token_id: int, logprob: float) -> Candidate:
        data = tokenizer.token_bytes(token_id)
        return Candidate(tokenizer.token_text(token_id), token_id, logprob, list(data))

    own = candidate(entry.token_id, entry.logprob)
    top = [candidate(token_id, logprob) for token_id, logprob in entry.top]
    return TokenLogprob(own.token, own.token_id, own.logprob, own.bytes, top, entry.rank)
