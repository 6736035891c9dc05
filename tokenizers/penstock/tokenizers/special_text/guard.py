"""Keeps what a client writes from becoming special tokens, though a template puts it between the template's own."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tokenizers

from ..bounded.pipeline import steps_of
from ..errors import ChatTemplateError
from .finder import Finder
from .guarded import guarded_tokens
from .sealed import SealedTokenizer

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

    def finds(self, messages: Sequence[Mapping[str, Any]], *others: Any) -> bool:
        """Whether any of the strings may be taken for a special token: if not, nothing else is to be done."""
        if self._all is None:
            return False
        all_texts: list[str] = []
        foreign_texts: list[str] = []
        for message in messages:
            for key, value in message.items():
                _collect(value, foreign_texts if _is_answer(message, key) else all_texts)
        _collect(others, all_texts)
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
        for key, each in value.items():
            texts.append(key)
            _collect(each, texts)
    elif isinstance(value, list | tuple):
        for each in value:
            _collect(each, texts)


def _marked(finder: Finder | None, value: Any, mark: str) -> Any:
    if finder is None:
        return value
    if isinstance(value, str):
        return finder.marked(value, mark)
    if isinstance(value, dict):
        return {finder.marked(key, mark): _marked(finder, each, mark) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(finder, each, mark) for each in value]
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
