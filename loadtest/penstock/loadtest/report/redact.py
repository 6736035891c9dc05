"""Reports are passed on: what authorizes does not go into them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from penstock.loadtest.options import Target
from penstock.loadtest.report.model import Report

HIDDEN = "***"
_NAMES = re.compile(r"auth|key|token|secret|cookie|password|signature", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(://[^/@:\s]*:)[^/@\s]+@")


def redacted(report: Report) -> Report:
    """Without the API key, what headers authorize with, and the passwords of addresses, in whatever text they stand:
    options, command, what a server said. Twice is as good as once."""
    return msgspec.convert(redacted_tree(msgspec.to_builtins(report), [report.options.target]), Report)


def redacted_tree(tree: Any, targets: Iterable[Target]) -> Any:
    """The same for nested dicts and lists, with the secrets of these targets."""
    secrets = sorted({secret for target in targets for secret in _secrets(target)}, key=len, reverse=True)
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(secret)}(?!\w)" for secret in secrets)) if secrets else None

    def hide(text: str) -> str:
        text = text.encode("utf-8", "replace").decode()  # half a surrogate pair cannot be written
        text = _URL_PASSWORD.sub(rf"\1{HIDDEN}@", text)
        return pattern.sub(HIDDEN, text) if pattern else text

    return _each_text(tree, hide)


def _secrets(target: Target) -> set[str]:
    found = {target.api_key or "", os.environ.get("OPENAI_API_KEY", "")}
    for header in target.header:
        name, _, content = header.partition(":")
        if _NAMES.search(name):
            found |= {content.strip(), *content.split()[-1:]}  # a scheme and what it authorizes with: Bearer, the key
    return found - {"", HIDDEN}


def _each_text(tree: Any, change: Callable[[str], str]) -> Any:
    if isinstance(tree, str):
        return change(tree)
    if isinstance(tree, dict):
        return {name: _each_text(value, change) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_each_text(value, change) for value in tree]
    return tree
