"""Redaction: settings and texts without keys, tokens and passwords.

Names decide first: the value of a setting or variable with such a name is left out, and wherever else that value turns
up, it is left out as well. Then forms decide: passwords in URLs, `password=...` in a text, keys that begin as those of
well-known services do.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

LEFT_OUT = "<left-out>"
_WORDS = (
    *("key", "keys", "apikey", "apikeys", "token", "secret", "secrets", "password", "passwords", "passwd"),
    *("pass", "passphrase", "credential", "credentials", "auth", "authorization", "bearer", "cookie", "salt", "pat"),
)
"""Parts of names whose values are secrets. Numbers are none: `token` is a word of models, too."""
_NAMES = frozenset({"http_restricted_api", "grpc_restricted_protocol"})
"""Settings that hold the value of a header."""
_SHORTEST = 6
"""Characters of a value that is looked for elsewhere: a shorter one would take words out of every text."""
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_ASSIGNED = re.compile(
    rf"((?:\b|_)(?:{'|'.join(_WORDS)})[\"']?\s*(?:[=:]\s*|\s+(?=Bearer\b))[\"']?(?:Bearer\s+)?)([^\s\"',;&}}\]]+)",
    re.IGNORECASE,
)
_URL_USER = re.compile(r"([a-z][a-z0-9+.-]{0,31}://)[^\s/@\"']*@", re.IGNORECASE)
"""Bounds on the parts keep the search linear in a text of whatever kind."""
_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|psk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{8,}"
    r"|github_pat_\w{8,}|glpat-[\w-]{8,}|xox[abprs]-[\w-]{8,}|AKIA[0-9A-Z]{12,}|ASIA[0-9A-Z]{12,}"
    r"|AIza[\w-]{20,}|eyJ[\w-]{8,512}\.[\w-]{8,}\.[\w-]*)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [^-]*-----|$)",
    re.DOTALL,
)


def is_secret(name: str) -> bool:
    """Whether a setting, a variable or a header of this name holds a secret."""
    parts = {part.lower() for part in _PART.findall(name)}
    return name in _NAMES or not parts.isdisjoint(_WORDS)


class Redaction:
    """Collects the secrets that it meets, so that they are left out of what comes later, too."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._secrets: set[str] = set()
        self.tree(dict(environ))

    def tree(self, value: Any) -> Any:
        """A tree of builtins without its secrets. A name that holds one may come behind a text that has it, too."""
        return self._walk(self._walk(value))

    def _walk(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(name): self._named(str(name), inner) for name, inner in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self._walk(inner) for inner in value]
        if not isinstance(value, str):
            return value
        inner = _object_in(value)
        return self.text(value) if inner is None else self._walk(inner)

    def _named(self, name: str, value: Any) -> Any:
        if not is_secret(name) or value is None or isinstance(value, bool | int | float):
            return self._walk(value)
        if value == LEFT_OUT:
            return value
        self._secrets.update(text for text in _texts(value) if len(text) >= _SHORTEST)
        return LEFT_OUT if value else value

    def text(self, text: str) -> str:
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, LEFT_OUT)
        text = _URL_USER.sub(rf"\1{LEFT_OUT}@", text)
        return _ASSIGNED.sub(rf"\1{LEFT_OUT}", _KNOWN.sub(LEFT_OUT, text))


def _object_in(text: str) -> dict[str, Any] | None:
    """Of a text that is a JSON object: its names say what is secret in it."""
    if not text.startswith("{"):
        return None
    with suppress(ValueError, RecursionError):
        settings = json.loads(text)
        return settings if isinstance(settings, dict) else None
    return None


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _texts(inner)
