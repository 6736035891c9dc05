"""A tokenizer that knows guarded tokens by secret names only."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterable, Mapping

import tokenizers

from ..bounded import BoundedEncoder
from ..one_call import encode_once
from .trie_pattern import trie_pattern

_UNKNOWN = "\U0010fffd"


class SealedTokenizer:
    """Encodes what `seal` has prepared exactly as the tokenizer itself encodes the text: the same model, the same steps
    and the same added tokens. Only guarded tokens are written differently, so no other text becomes one.

    Safe to use from several threads.
    """

    def __init__(self, backend: tokenizers.Tokenizer, guarded: Mapping[str, int]) -> None:
        self.secret = "".join(secrets.choice(string.ascii_lowercase) for _ in range(12))
        """In every secret name. A text that holds it cannot be sealed."""
        self._names = {content: f"<{self.secret}{n}>" for n, content in enumerate(guarded)}
        added = backend.get_added_tokens_decoder()
        # All added tokens are looked for, because the longest one at a place is what counts.
        self._tokens = re.compile(trie_pattern({token.content for token in added.values()}))
        self._backend = _with_other_tokens(backend, [_renamed(added[i], self._names) for i in sorted(added)])
        self._ids = self._new_ids(added)
        self._spellings: dict[int, list[int]] = {}
        self._spellings = self._find_spellings(backend, guarded)
        self._bounded = BoundedEncoder(self._backend, self._encode)

    def seal(self, text: str) -> str:
        """Writes each guarded token in `text` by its secret name."""
        return self._tokens.sub(lambda match: self._names.get(match[0], match[0]), text)

    def encode(self, text: str, add_special_tokens: bool = False, limit: int | None = None) -> list[int]:
        """As `Tokenizer.encode`, of a sealed text."""
        if limit is None:
            return self._encode(text, add_special_tokens)
        return self._bounded.encode(text, add_special_tokens, limit)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = encode_once(self._backend, text, add_special_tokens)
        if not self._spellings.keys().isdisjoint(ids):
            ids = [part for i in ids for part in self._spellings.get(i, (i,))]
        return [self._ids.get(i, i) for i in ids]

    def _new_ids(self, added: Mapping[int, tokenizers.AddedToken]) -> dict[int, int]:
        """The model's id for each token that has another one here."""
        found = {}
        for i, token in added.items():
            here = self._backend.token_to_id(self._names.get(token.content, token.content))
            if here is not None and here != i:
                found[here] = i
        return found

    def _find_spellings(self, backend: tokenizers.Tokenizer, guarded: Mapping[str, int]) -> dict[int, list[int]]:
        """A few models make guarded tokens of ordinary text by themselves: they have them in their vocabulary as
        pieces. These are replaced by smaller pieces. Their token for unknown text is not: it stands for that here."""
        unknown = {getattr(backend.model, "unk_token", None)}
        unknown_ids = set(encode_once(self._backend, _UNKNOWN, False))
        texts = {
            i: content
            for content, i in guarded.items()
            if backend.model.token_to_id(content) is not None and content not in unknown and i not in unknown_ids
        }
        return {i: self._spelled(content, texts.keys()) for i, content in texts.items()}

    def _spelled(self, content: str, forbidden: Iterable[int]) -> list[int]:
        for pieces in ([content[:1], content[1:]], list(content)):
            ids = [i for piece in pieces for i in encode_once(self._backend, piece, False)]
            if set(ids).isdisjoint(forbidden):
                break
        return [i for i in ids if i not in forbidden]


def _with_other_tokens(backend: tokenizers.Tokenizer, tokens: list[tokenizers.AddedToken]) -> tokenizers.Tokenizer:
    """Shares the model with `backend`, so it takes little memory and no time."""
    other = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        other.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        other.pre_tokenizer = backend.pre_tokenizer
    if backend.post_processor is not None:
        other.post_processor = backend.post_processor
    other.add_tokens(tokens)
    return other


def _renamed(token: tokenizers.AddedToken, names: Mapping[str, str]) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        names.get(token.content, token.content),
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )
