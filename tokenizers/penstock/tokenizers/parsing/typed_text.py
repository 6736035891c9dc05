"""Values that a model writes as plain text, as JSON of the types that a tool's schema allows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .json_text import quoted
from .python_text import read_literal
from .reader import Reader

Types = frozenset[str]
"""Types of JSON schema. Empty: not known."""
STRING: Types = frozenset({"string"})
_DEEPEST = 8
"""Alternatives within alternatives of a schema. The client writes the schemas."""
_PYTHON_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),  # before int: True is one
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)
_NAMES = frozenset(name for _, name in _PYTHON_TYPES)
_UNKNOWN: Types = frozenset()


def parameter_types(parameters: Mapping[str, Any] | None) -> dict[str, Types]:
    """The types of each parameter of a tool. Where a schema is not as it should be, they are not known."""
    properties = parameters.get("properties") if parameters is not None else None
    if not isinstance(properties, Mapping):
        return {}
    return {str(name): _types(schema, 0) for name, schema in properties.items()}


def _types(schema: object, depth: int) -> Types:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return _UNKNOWN
    named = schema.get("type")
    if named is not None:
        names = frozenset(map(str, named if isinstance(named, list) else [named]))
        return names if names <= _NAMES else _UNKNOWN
    if isinstance(schema.get("enum"), list):
        return frozenset(_type_of(value) for value in schema["enum"])
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            alternatives = [_types(alternative, depth + 1) for alternative in schema[key]]
            return frozenset[str]().union(*alternatives) if all(alternatives) else _UNKNOWN
    return _UNKNOWN


def typed_json(text: str, types: Types) -> str:
    """JSON for `text`: as it is if that is JSON of one of the types, or a Python literal of one; else a string."""
    if types != STRING:
        for read in (str.strip, _from_python):
            json_text = read(text)
            if _fits(_json_type(json_text), types):
                return json_text
    return quoted(text)


def _fits(found: str, types: Types) -> bool:
    """Strings are written without quotes, so what is JSON of a string is a string with quotes in it."""
    if found in ("", "string"):
        return False
    return not types or found in types or (found == "integer" and "number" in types)


def _json_type(text: str) -> str:
    """Empty if it is no JSON."""
    try:
        return _type_of(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return ""


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


def _type_of(value: object) -> str:
    return next((name for kind, name in _PYTHON_TYPES if isinstance(value, kind)), "")


def _from_python(text: str) -> str:
    """The JSON of a Python literal, for what is written as `{'a': True}`; empty if the text is none."""
    reader, pieces = Reader(), list[str]()
    reader.feed(text)
    reader.end()
    reading = read_literal(reader, pieces.append)
    try:
        next(reading)
    except StopIteration as stop:
        return "".join(pieces) if stop.value and not reader.rest().strip() else ""
    return ""
