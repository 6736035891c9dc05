"""Special tokens in what clients send: their text stays text, and only a chat template writes the tokens."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from .bounded import BoundedEncoder
from .bounded.pipeline import steps_of
from .errors import ChatTemplateError, encode_once


def trie_pattern(words: Collection[str]) -> str:
    """Matches the longest of `words` that stands at a place. There must be at least one, and none empty."""
    rests: dict[str, set[str]] = {}
    for word in words:
        if word:
            rests.setdefault(word[0], set()).add(word[1:])
    options = [_option(first, rest) for first, rest in sorted(rests.items())]
    body = options[0] if len(options) == 1 else "|".join(options)
    if "" in words:
        return f"(?:{body})?"
    return body if len(options) == 1 else f"(?:{body})"


def lookahead_pattern(words: Collection[str]) -> str:
    """Matches the first character of each of `words`, so that words which overlap are all found."""
    rests: dict[str, set[str]] = {}
    for word in words:
        rests.setdefault(word[0], set()).add(word[1:])
    return "|".join(f"{re.escape(first)}(?={trie_pattern(rest)})" for first, rest in sorted(rests.items()))


def _option(start: str, rests: set[str]) -> str:
    """What all rests have in common goes into `start`, so that the pattern is nested no deeper than they branch."""
    while len(firsts := {rest[:1] for rest in rests}) == 1:
        [first] = firsts
        if not first:
            return re.escape(start)
        start += first
        rests = {rest[1:] for rest in rests}
    return re.escape(start) + trie_pattern(rests)


_WORD = re.compile(r"\w+")
_END = "\0"


class Finder:
    def __init__(self, contents: Collection[str], normalize: Callable[[str], str] | None = None) -> None:
        """`normalize`: what a tokenizer does to a text before it looks for these tokens, where that can make one of
        other text."""
        self._whole = re.compile(lookahead_pattern(contents))
        self._longest = max(map(len, contents))
        firsts, lasts = {text[0] for text in contents}, {text[-1] for text in contents}
        self._first, self._last = _any_of(firsts), _any_of(lasts)
        chars = set().union(*contents)
        self._chars = re.compile(f"{_any_of(chars).pattern}+")
        self._sign = _any_of({char for char in chars if _WORD.match(char) is None} | firsts | lasts)
        """What every text has that holds a token, or may be a part of one."""
        self._all = _END + _END.join(contents) + _END
        self._normalize = normalize
        self._whole_normal = self._whole
        if normalize is not None:
            normal = {normalize(text).strip(" ▁") for text in contents}
            self._whole_normal = re.compile(lookahead_pattern(normal - {""}))

    def finds(self, texts: list[str]) -> bool:
        """Whether one of `texts` has a token's text, or may be a part of one together with what stands around it."""
        if self._normalize is not None and any(map(self._finds_normal, texts)):
            return True
        if self._sign.search(_END.join(texts)) is None:
            return False
        return any(self._whole.search(text) is not None or self._is_part(text) for text in texts)

    def marked(self, text: str, mark: str) -> str:
        """`text` with a `mark` inside each token's text. White space around it stays outside of marks: templates trim
        what they are given."""
        replaced = self._whole.sub(lambda match: match[0] + mark, text)
        if not self._is_part(text):
            return replaced
        bare = replaced.strip()
        at = replaced.index(bare)
        return f"{replaced[:at]}{mark}{bare}{mark}{replaced[at + len(bare) :]}"

    def _finds_normal(self, text: str) -> bool:
        assert self._normalize is not None
        return self._whole_normal.search(self._normalize(text)) is not None

    def _is_part(self, text: str) -> bool:
        if self._sign.search(text) is None:
            return False
        head, tail = text.lstrip()[: self._longest], text.rstrip()[-self._longest :]
        return (
            any(_END + tail[at.start() :] in self._all for at in self._first.finditer(tail))
            or any(head[: at.end()] + _END in self._all for at in self._last.finditer(head))
            or (len(head) < self._longest and self._is_middle(head.rstrip()))
        )

    def _is_middle(self, text: str) -> bool:
        """Plain words do not count: templates compare them (`string`, `function`), and look values up by them."""
        return self._chars.fullmatch(text) is not None and _WORD.fullmatch(text) is None and text in self._all


def _any_of(chars: Iterable[str]) -> re.Pattern[str]:
    return re.compile(f"[{''.join(map(re.escape, sorted(chars)))}]")


_TURN_TAG = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)


def guarded_tokens(
    backend: tokenizers.Tokenizer, template_source: str, own_tags: Collection[str] = ()
) -> dict[str, int]:
    """Text and id of each: the special ones, and of the other added tokens those that the template writes itself, that
    look like a template's, or that the model writes as tags (DeepSeek's `<｜User｜>` and Qwen's `<think>` are such).

    Runs of white space, HTML tags and whatever else a tokenizer has for ordinary text are not among them.
    """
    added = backend.get_added_tokens_decoder()
    return {token.content: i for i, token in sorted(added.items()) if _is_guarded(token, template_source, own_tags)}


def _is_guarded(token: tokenizers.AddedToken, template_source: str, own_tags: Collection[str]) -> bool:
    text = token.content
    if len(text) < 2 or not text.strip(" \t\r\n▁"):
        return False
    return token.special or text in own_tags or text in template_source or _TURN_TAG.fullmatch(text) is not None


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
        ids = {}
        for i, token in added.items():
            here = self._backend.token_to_id(self._names.get(token.content, token.content))
            if here is not None and here != i:
                ids[here] = i
        return ids

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


_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Characters that Unicode keeps for use inside of programs: a text hardly ever has one, and nearly never all."""
_UNICODE_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}


class SpecialTextGuard:
    """For one model. Safe to use from several threads.

    A client's strings get a mark inside each text of a guarded token; the template is rendered with them. Whatever it
    wrote itself has no mark, so that it can be told apart: it gets a secret name, and the marks are taken out.
    """

    def __init__(self, backend: tokenizers.Tokenizer, template_source: str, own_tags: Collection[str] = ()) -> None:
        """`own_tags`: what the model writes itself, so that the assistant's earlier turns may hold it."""
        self._backend = backend
        self.tokens: dict[str, int] = guarded_tokens(backend, template_source, own_tags)
        """Text and id of those that only templates write."""
        self._source = template_source
        normalize = _normalize(backend, self.tokens)
        foreign = self.tokens.keys() - own_tags
        self._all = Finder(self.tokens, normalize) if self.tokens else None
        self._foreign = Finder(foreign, normalize) if foreign else None
        self._sealed: SealedTokenizer | None = None

    def finds(self, messages: Sequence[Mapping[str, Any]], *values: Any) -> bool:
        """Whether any of the strings may be taken for a special token: if not, nothing else is to be done."""
        if self._all is None:
            return False
        all_texts: list[str] = []
        foreign_texts: list[str] = []
        for message in messages:
            for key, value in message.items():
                _collect(value, foreign_texts if _is_answer(message, key) else all_texts)
        _collect(values, all_texts)
        return self._all.finds(all_texts) or (self._foreign is not None and self._foreign.finds(foreign_texts))

    def choose_mark(self, *values: Any) -> str:
        """A character that no string has, nor writes as an escape of JSON."""
        texts = [self._source]
        _collect(values, texts)
        for mark in _MARKS:
            if not any(mark in text or _escape(mark) in text for text in texts):
                return mark
        raise ChatTemplateError("the messages hold all of the characters U+FDD0 to U+FDEF, which stand for no text")

    def marked_messages(self, messages: Sequence[Mapping[str, Any]], mark: str) -> list[dict[str, Any]]:
        return [
            {
                key: _marked(self._foreign if _is_answer(message, key) else self._all, value, mark)
                for key, value in message.items()
            }
            for message in messages
        ]

    def marked(self, value: Any, mark: str) -> Any:
        """The same with JSON of any other kind."""
        return _marked(self._all, value, mark)

    def seal(self, text: str, mark: str) -> tuple[str, SealedTokenizer]:
        """A rendered text as the tokenizer that comes with it reads it."""
        sealed = self._sealed
        while sealed is None or sealed.secret in text:
            self._sealed = sealed = SealedTokenizer(self._backend, self.tokens)
        return self.unmarked(sealed.seal(text), mark), sealed

    def unmarked(self, text: str, mark: str) -> str:
        return re.sub(f"{mark}|{re.escape(_escape(mark))}", "", text)


def _escape(mark: str) -> str:
    """As JSON writes it in ASCII."""
    return f"\\u{ord(mark):04x}"


def _is_answer(message: Mapping[str, Any], key: str) -> bool:
    """What the model wrote, with its own tags. Thoughts and calls have fields of their own, so tags inside of these are
    text."""
    return key == "content" and message.get("role") == "assistant"


def _collect(value: Any, texts: list[str]) -> None:
    """All strings of a JSON value, the names of fields included."""
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            texts.append(key)
            _collect(item, texts)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, texts)


def _marked(finder: Finder | None, value: Any, mark: str) -> Any:
    if finder is None:
        return value
    if isinstance(value, str):
        return finder.marked(value, mark)
    if isinstance(value, dict):
        return {finder.marked(key, mark): _marked(finder, item, mark) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(finder, item, mark) for item in value]
    return value


def _normalize(backend: tokenizers.Tokenizer, guarded: Collection[str]) -> Any:
    """None where normalization makes none of the guarded tokens out of other text."""
    added = backend.get_added_tokens_decoder().values()
    if backend.normalizer is None or not any(token.normalized and token.content in guarded for token in added):
        return None
    steps = [step for step in steps_of(backend.normalizer, "normalizers") if not _only_spaces(step)]
    if not steps:
        return None
    normalize = backend.normalizer.normalize_str
    if {step["type"] for step in steps} <= _UNICODE_FORMS:
        return lambda text: text if text.isascii() else normalize(text)
    return normalize


def _only_spaces(step: Mapping[str, Any]) -> bool:
    return bool(step["type"] == "Prepend" or (step["type"] == "Replace" and step["pattern"] == {"String": " "}))
