"""Schemas of all that another schema forbids."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

_TYPES = ("null", "boolean", "object", "array", "number", "string")
ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
)
ANY_TEXT = r"[\s\S]"


def negated(schema: Any) -> Any:
    """What allows only what `schema` forbids, in 2020-12. Nearly all of it: where integers are allowed, other numbers
    are left out as well. None: there is no such schema in words that llguidance knows."""
    if isinstance(schema, bool):
        return not schema
    alternatives = []
    for keyword, value in schema.items():
        if keyword in ANNOTATIONS:
            continue
        negate = _KEYWORDS.get(keyword)
        opposite = None if negate is None else negate(value)
        if opposite is None:
            return None
        alternatives.append(opposite)
    return _any_of(alternatives)


def _any_of(schemas: list[Any]) -> Any:
    possible = [schema for schema in schemas if schema is not False]
    if not possible:
        return False
    return possible[0] if len(possible) == 1 else {"anyOf": possible}


def _other_types(types: Iterable[str]) -> Any:
    """All but these."""
    barred = {"number" if name == "integer" else name for name in types}
    return {"type": [name for name in _TYPES if name not in barred]}


def _not_among(values: list[Any]) -> Any:
    texts = [value for value in values if isinstance(value, str)]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if any(isinstance(value, dict | list) for value in values):
        return None
    alternatives = [_other_types(_type_of(value) for value in values)]
    if texts:
        alternatives.append({"type": "string", "pattern": f"^(?:{_other_texts(texts)})$"})
    if numbers:
        bounds = [None, *sorted(numbers), None]
        for low, high in pairwise(bounds):
            limits = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            alternatives.append(
                {"type": "number"} | {name: limit for name, limit in limits.items() if limit is not None}
            )
    truths = {value for value in values if isinstance(value, bool)}
    if truths:
        alternatives += [{"const": value} for value in (True, False) if value not in truths]
    return _any_of(alternatives)


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    return "string" if isinstance(value, str) else "number"


def _other_texts(texts: Iterable[str]) -> str:
    """A regular expression of all texts but these."""
    by_first: dict[str, list[str]] = {}
    ends = False
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
        else:
            ends = True
    if not by_first:
        return f"{ANY_TEXT}+"
    first_chars = "".join(_in_brackets(first) for first in by_first)
    branches = [] if ends else [""]
    branches.append(f"[^{first_chars}]{ANY_TEXT}*")
    branches += [f"{re.escape(first)}(?:{_other_texts(rest)})" for first, rest in by_first.items()]
    return "|".join(branches)


def _in_brackets(character: str) -> str:
    return f"\\{character}" if character in "\\]^-[&~" else character


def _without(names: list[str]) -> Any:
    return _any_of([{"type": "object", "properties": {name: False}} for name in names])


def _some_property(properties: Mapping[str, Any]) -> Any:
    alternatives = []
    for name, schema in properties.items():
        other = negated(schema)
        if other is None:
            return None
        alternatives.append(
            False if other is False else {"type": "object", "required": [name], "properties": {name: other}}
        )
    return _any_of(alternatives)


def _none(schemas: list[Any]) -> Any:
    negations = [negated(schema) for schema in schemas]
    return None if None in negations else {"allOf": negations}


def _some(schemas: list[Any]) -> Any:
    negations = [negated(schema) for schema in schemas]
    return None if None in negations else _any_of(negations)


def _bound(kind: str, keyword: str, change: int = 0, least: int | None = None) -> Callable[[Any], Any]:
    def negate(limit: Any) -> Any:
        if least is not None and limit + change < least:
            return False
        return {"type": kind, keyword: limit + change}

    return negate


_KEYWORDS: dict[str, Callable[[Any], Any]] = {
    "type": lambda types: _other_types([types] if isinstance(types, str) else types),
    "const": lambda value: _not_among([value]),
    "enum": _not_among,
    "minimum": _bound("number", "exclusiveMaximum"),
    "maximum": _bound("number", "exclusiveMinimum"),
    "exclusiveMinimum": _bound("number", "maximum"),
    "exclusiveMaximum": _bound("number", "minimum"),
    "minLength": _bound("string", "maxLength", -1, 0),
    "maxLength": _bound("string", "minLength", 1),
    "minItems": _bound("array", "maxItems", -1, 0),
    "maxItems": _bound("array", "minItems", 1),
    "minProperties": _bound("object", "maxProperties", -1, 0),
    "maxProperties": _bound("object", "minProperties", 1),
    "required": _without,
    "properties": _some_property,
    "anyOf": _none,
    "allOf": _some,
    "not": lambda schema: schema,
}
