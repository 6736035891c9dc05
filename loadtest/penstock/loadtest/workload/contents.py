"""The prompts of a workload, made for one protocol, and what is known of their tokens."""

from __future__ import annotations

from functools import lru_cache
from random import Random
from typing import Any

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.messages import Prompt
from penstock.loadtest.options import Options, WorkloadOptions
from penstock.loadtest.workload.vocabulary import (
    COMMON,
    FittedWords,
    Source,
    TokenIds,
    Vocabulary,
    Words,
    load_vocabulary,
)

CHATS = frozenset({"openai-chat", "openai-responses"})
"""The server puts messages into its template, and counts more than what is sent: by how much, we do not know."""
TAKE_IDS = frozenset({"openai-completions", "openai-embeddings"})
TENSORS = frozenset({"kserve-http", "kserve-http-binary", "kserve-grpc"})
"""Nothing is prompted and nothing generated: the client makes the tensors."""

_BLOCKS = 4096


class Contents:
    """What the parts of a workload draw their prompts from."""

    def __init__(self, options: Options, seed: int, source: Source[Any] | None = None) -> None:
        """`source`: as `build`. Raises LoadTestError for a tokenizer that cannot be had, and for ids that nobody
        takes."""
        workload, protocol = options.workload, options.target.protocol
        if workload.token_ids and protocol not in TAKE_IDS:
            raise LoadTestError(f"token-ids: {protocol} takes no token ids, only {' and '.join(sorted(TAKE_IDS))} do")
        if workload.token_ids and workload.tokenizer is None:
            raise LoadTestError("token-ids: needs --tokenizer, which says what ids there are")
        self.seed = seed
        self.protocol = protocol
        self.vocabulary = None if workload.tokenizer is None else load_vocabulary(workload.tokenizer)
        self.source = source or _source(workload, self.vocabulary, seed)
        self._chat = protocol in CHATS
        self._inputs = options.target.batch_size if protocol == "openai-embeddings" else 1
        """Of a request: the prompt, and it again so many times."""
        self._added = 0
        if self.vocabulary is not None and not self._chat and not workload.token_ids:
            self._added = self.vocabulary.added
        self.block = lru_cache(maxsize=_BLOCKS)(self._block)

    def rng(self, *names: object) -> Random:
        """Numbers that depend on the seed and the names alone."""
        return Random("/".join(map(str, (self.seed, *names))))

    def own_tokens(self, tokens: int) -> int:
        """Of a prompt that is to have so many, those that are not the tokenizer's BOS and the like; at least 1."""
        return max(1, tokens - self._added)

    def known_tokens(self, own: int) -> int | None:
        """What the server should count for a prompt with so many tokens of its own."""
        return None if self.vocabulary is None or self._chat else (own + self._added) * self._inputs

    def asked_tokens(self, tokens: int) -> int | None:
        """Of a request whose prompts are to have so many each."""
        return None if self.protocol in TENSORS else tokens * self._inputs

    def count(self, prompt: Prompt) -> int | None:
        """The same for a prompt that was not made here."""
        if self._chat:
            return None
        if isinstance(prompt, str):
            return None if self.vocabulary is None else self.known_tokens(self.vocabulary.count(prompt))
        return len(prompt)

    def output_tokens(self, tokens: int) -> int:
        return tokens if self.protocol not in TENSORS and self.protocol != "openai-embeddings" else 0

    def _block(self, block: int, tokens: int) -> Any:
        """The piece of prompt that a trace calls by a number."""
        return self.source.piece(tokens, self.rng("block", block))


def _source(workload: WorkloadOptions, vocabulary: Vocabulary | None, seed: int) -> Source[Any]:
    if vocabulary is None:
        return Words(COMMON, seed)
    if workload.token_ids:
        return TokenIds(vocabulary.ids, seed)
    return Words(vocabulary.words, seed) if vocabulary.words else FittedWords(vocabulary, seed)


def spread(mean: int, stddev: float, rng: Random) -> int:
    """A length of a normal distribution; at least 1."""
    return max(1, round(rng.gauss(mean, stddev))) if stddev else mean
