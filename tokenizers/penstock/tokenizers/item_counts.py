"""A bound on arrays in schemas. llguidance makes a part of a grammar for each item that `minItems` and `maxItems` name,
before it looks at its own bounds: 100 bytes and 2 us each, so that a short schema could take all of the memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from . import lark

MOST_ITEMS = 1 << 16
"""Of all arrays of a grammar together."""


def check_item_counts(kind: str, text: str) -> None:
    """`kind` and `text` as in `GrammarCompiler.compile`. Raises ValueError for a grammar with more items."""
    schemas: list[Any] = []

    def keep(schema: str) -> None:
        schemas.append(json.loads(schema))

    with suppress(json.JSONDecodeError):  # who compiles it says what is wrong with it
        if kind == "json_schema":
            keep(text)
        elif kind == "grammar":
            lark.with_schemas(text, keep)
    if _num_items(schemas) > MOST_ITEMS:
        raise ValueError(f"minItems and maxItems of its arrays are more than {MOST_ITEMS} together")


def _num_items(node: Any) -> float:
    found, left = 0.0, [node]
    while left:
        node = left.pop()
        if isinstance(node, Mapping):
            counts = (node.get("minItems"), node.get("maxItems"))
            found += sum(max(0, count) for count in counts if isinstance(count, int | float))
            left += node.values()
        elif isinstance(node, list):
            left += node
    return found
