"""The schemas of JSON-Schema-Test-Suite, and what answers to them are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jsonschema import validators
from referencing import Registry
from referencing.jsonschema import DRAFT202012


class Case(NamedTuple):
    keyword: str
    """The file's name."""
    title: str
    schema: Any


class Suite:
    def __init__(self, folder: Path, draft: str) -> None:
        """`folder` has `tests` and `remotes`."""
        self._tests = folder / "tests" / draft
        remotes = folder / "remotes"
        resources = [
            (f"http://localhost:1234/{path.relative_to(remotes).as_posix()}", json.loads(path.read_text()))
            for path in sorted(remotes.rglob("*.json"))
        ]
        contents = [(name, DRAFT202012.create_resource(content)) for name, content in resources]
        self._registry: Any = Registry().with_resources(contents)

    def cases(self) -> Iterator[Case]:
        """Of the keywords that every implementation must have."""
        for path in sorted(self._tests.glob("*.json")):
            for group in json.loads(path.read_text()):
                yield Case(path.stem, group["description"], group["schema"])

    def problem(self, schema: Any, text: str) -> str:
        """Why this text is not JSON that the schema allows; empty: it is."""
        try:
            value = json.loads(text)
        except ValueError as error:
            return f"no JSON: {error}"
        kind: Any = validators.validator_for(schema, default=validators.Draft202012Validator)
        first = next(kind(schema, registry=self._registry).iter_errors(value), None)
        return "" if first is None else str(first.message)[:200]
