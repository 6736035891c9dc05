"""The properties and items that a schema looks at, for `unevaluatedProperties` and `unevaluatedItems`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MOST = 1 << 23
_LEAST = 64
"""Of each step."""


class Effort:
    """What is left of it, in characters that are read. About a second."""

    def __init__(self) -> None:
        self._left = _MOST

    def spend(self, chars: int = 0) -> None:
        """Before each step. Raises ValueError when nothing is left."""
        self._left -= chars + _LEAST
        if self._left < 0:
            raise ValueError("the schema takes too long to put in other words")


_DEEPEST = 16


@dataclass(frozen=True)
class Names:
    """Of properties that are certainly evaluated where an instance fits."""

    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    all: bool = False

    def __or__(self, other: Names) -> Names:
        return Names(self.names | other.names, self.patterns | other.patterns, self.all or other.all)

    def described(self) -> dict[str, Any]:
        """As a schema that allows these to be anything."""
        kinds = {"properties": self.names, "patternProperties": self.patterns}
        return {keyword: dict.fromkeys(sorted(some), True) for keyword, some in kinds.items() if some}


class Evaluated:
    """Some of what an instance's properties and items are evaluated by: what must hold of all instances, not what holds
    of those that fit one of several alternatives."""

    def __init__(self, root: Mapping[str, Any], effort: Effort) -> None:
        self._root = root
        self.effort = effort

    def properties(self, schema: Any, depth: int = 0) -> Names:
        if not isinstance(schema, dict) or depth > _DEEPEST:
            return Names()
        names = Names(
            frozenset(schema.get("properties", ())),
            frozenset(schema.get("patternProperties", ())),
            "additionalProperties" in schema or "unevaluatedProperties" in schema,
        )
        for one in self._beside(schema):
            self.effort.spend(len(names.names) + len(names.patterns))
            names |= self.properties(one, depth + 1)
        return names

    def items(self, schema: Any, depth: int = 0) -> float:
        """How many items from the first one on; inf: all."""
        if not isinstance(schema, dict) or depth > _DEEPEST:
            return 0
        if "items" in schema or "unevaluatedItems" in schema:
            return float("inf")
        return max([len(schema.get("prefixItems", ())), *(self.items(one, depth + 1) for one in self._beside(schema))])

    def resolved(self, schema: Any) -> Any:
        """What a schema refers to that is nothing but a reference."""
        for _ in range(_DEEPEST):
            if not (isinstance(schema, dict) and schema.keys() == {"$ref"}):
                return schema
            schema = self._at(schema["$ref"])
        return None

    def _beside(self, schema: Mapping[str, Any]) -> list[Any]:
        self.effort.spend()
        return [*schema.get("allOf", ()), *([self._at(schema["$ref"])] if "$ref" in schema else [])]

    def _at(self, reference: str) -> Any:
        """None: not in this document."""
        if not reference.startswith("#"):
            return None
        place: Any = self._root
        for step in reference[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            place = place.get(name) if isinstance(place, dict) else None
        return place
