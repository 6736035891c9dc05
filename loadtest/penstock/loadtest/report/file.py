"""Reports as JSON, without what authorizes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import Target
from penstock.loadtest.report.model import SCHEMA, Report

_DIGITS = 6


def to_json(report: Report) -> str:
    """Numbers with six digits, at least four of them behind the point: as precise as figures are."""
    return msgspec.json.format(msgspec.json.encode(rounded(msgspec.to_builtins(report))), indent=2).decode() + "\n"


def rounded(tree: Any) -> Any:
    """What is no number in JSON (infinite, not a number) becomes null."""
    if isinstance(tree, float):
        if not math.isfinite(tree):
            return None
        digits = max(4, _DIGITS - 1 - math.floor(math.log10(abs(tree)))) if tree else 0
        return round(tree, digits)
    if isinstance(tree, dict):
        return {name: rounded(value) for name, value in tree.items()}
    return [rounded(value) for value in tree] if isinstance(tree, list | tuple) else tree


def read(path: str) -> Report:
    """A report that `--json` wrote. Raises LoadTestError, naming the file."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise LoadTestError(f"{path}: {error.strerror or error}") from None
    try:
        tree = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LoadTestError(f"{path}: not JSON: {error}") from None
    schema = tree.get("schema") if isinstance(tree, dict) else None
    if schema != SCHEMA:
        what = "has no schema" if schema is None else f"is of the schema {schema!r}"
        raise LoadTestError(f"{path}: {what}; a report of penstock loadtest --json has {SCHEMA!r}")
    try:
        return msgspec.convert(tree, Report)
    except msgspec.ValidationError as error:
        raise LoadTestError(f"{path}: not a report: {error}") from None


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
    secrets = {target.api_key or "", os.environ.get("OPENAI_API_KEY", "")}
    for header in target.header:
        name, _, content = header.partition(":")
        if _NAMES.search(name):
            secrets |= {content.strip(), *content.split()[-1:]}  # a scheme and what it authorizes with: Bearer, the key
    return secrets - {"", HIDDEN}


def _each_text(tree: Any, change: Callable[[str], str]) -> Any:
    if isinstance(tree, str):
        return change(tree)
    if isinstance(tree, dict):
        return {name: _each_text(value, change) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_each_text(value, change) for value in tree]
    return tree
