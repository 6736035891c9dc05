"""Reports as JSON."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from penstock.loadtest.errors import LoadTestError
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
