"""Keywords that llguidance does not know, in words that it knows.

What a rewritten schema allows, the schema allows as well. The reverse is not always true: where an array must contain
something, that comes first; and where some of several alternatives hold, the properties and items that they describe
are those of one of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import isinf
from typing import Any

from .evaluated import Effort, Evaluated
from .negation import ANNOTATIONS, ANY_TEXT, negated

_DRAFTS = ("https://json-schema.org/draft/2020-12/schema", "https://json-schema.org/draft/2020-12/schema#")
_MAX_CHARS = 262_144
_MOST = 32
"""Items that must be contained, and alternatives."""
_ONE = (
    "not",
    "items",
    "additionalProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
    "contains",
    "propertyNames",
)
_SEVERAL = ("allOf", "anyOf", "prefixItems")
"""Not `oneOf`: where one of its schemas allows less, the whole may allow more."""
_NAMED = ("properties", "patternProperties", "$defs")
_COUNTS = frozenset(
    ["maxLength", "minLength", "maxItems", "minItems", "maxProperties", "minProperties", "maxContains", "minContains"],
)
_FORMATS = {
    "idn-email": {"format": "email"},
    "iri": {"format": "uri"},
    "iri-reference": {"format": "uri"},
    "uri-reference": {"format": "uri"},
    "uri-template": {"format": "uri"},
    "json-pointer": {"pattern": "^(?:/(?:[^~/]|~[01])*)*$"},
    "relative-json-pointer": {"pattern": "^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$"},
}
"""Texts of these have the format as well."""

Schema = dict[str, Any]


def rewritten(text: str, effort: Effort | None = None) -> str | None:
    """A schema in other words. None: it is not of draft 2020-12, or there is nothing to say in other words. Several may
    share an `effort`. Raises ValueError when it is used up."""
    root = json.loads(text)
    if isinstance(root, bool):
        return json.dumps({} if root else {"not": {}})
    if not isinstance(root, dict) or root.get("$schema", _DRAFTS[0]) not in _DRAFTS or has_others_inside(root):
        return None
    effort = effort or Effort()
    other = _Rewriting(Evaluated(root, effort)).of(root)
    if not _choices_are_as_before(root, other, effort):
        return None
    result = json.dumps(other)
    return result if len(result) <= _MAX_CHARS and result != json.dumps(root) else None


def has_others_inside(root: Schema) -> bool:
    """Schemas of other drafts, or with names: copies of these would have the same name."""
    inner = json.dumps({key: value for key, value in root.items() if key not in ("$schema", "$id")})
    return any(f'"{key}"' in inner for key in ("$schema", "$id", "$anchor", "$dynamicAnchor", "$dynamicRef"))


def _choices_are_as_before(root: Schema, other: Schema, effort: Effort) -> bool:
    """What each `oneOf` refers to is not rewritten."""
    before, after, seen = Evaluated(root, effort), Evaluated(other, effort), set[str]()
    open_references = _references([*_values_of("oneOf", other)])
    while open_references:
        reference = open_references.pop()
        if reference not in seen:
            seen.add(reference)
            target = after.resolved({"$ref": reference})
            written = json.dumps(target)
            effort.spend(len(written))
            if target is None or written != json.dumps(before.resolved({"$ref": reference})):
                return False
            open_references += _references(target)
    return True


def _values_of(keyword: str, place: Any) -> list[Any]:
    """All, wherever they are."""
    if isinstance(place, list):
        return [value for inner in place for value in _values_of(keyword, inner)]
    if not isinstance(place, dict):
        return []
    inside = [value for inner in place.values() for value in _values_of(keyword, inner)]
    return [*([place[keyword]] if keyword in place else []), *inside]


def _references(place: Any) -> list[str]:
    return [reference for reference in _values_of("$ref", place) if isinstance(reference, str)]


class _Rewriting:
    def __init__(self, evaluated: Evaluated) -> None:
        self._evaluated = evaluated

    def of(self, schema: Any) -> Any:
        """One schema, and all inside of it."""
        if not isinstance(schema, dict):
            return schema
        self._evaluated.effort.spend(len(json.dumps(schema)))
        node = dict(schema)
        for rule in _RULES:
            rule(node, self._evaluated)
        return {keyword: self._inside(keyword, value) for keyword, value in node.items()}

    def _inside(self, keyword: str, value: Any) -> Any:
        if keyword in _ONE:
            return self.of(value)
        if keyword in _SEVERAL and isinstance(value, list):
            return [self.of(inner) for inner in value]
        if keyword in _NAMED and isinstance(value, dict):
            return {name: self.of(inner) for name, inner in value.items()}
        return value


def _require(node: Schema, *schemas: Any) -> None:
    node["allOf"] = [*node.get("allOf", ()), *schemas]


def _require_one(node: Schema, schemas: list[Any]) -> None:
    """Of alternatives."""
    if "anyOf" in node:
        _require(node, {"anyOf": schemas})
    else:
        node["anyOf"] = schemas


def _whole_numbers(node: Schema, _: Evaluated) -> None:
    for keyword in _COUNTS & node.keys():
        if isinstance(node[keyword], float) and node[keyword].is_integer():
            node[keyword] = int(node[keyword])


def _format(node: Schema, _: Evaluated) -> None:
    other = _FORMATS.get(node["format"]) if isinstance(node.get("format"), str) else None
    if other is not None and node.get("type") != "string":  # the schema says nothing of other types
        del node["format"]
        _require_one(node, [{"type": "string", **other}, negated({"type": "string"})])
    elif other is not None:
        del node["format"]
        _require(node, {"type": "string", **other})


def _conditions(node: Schema, _: Evaluated) -> None:
    condition, then, other = node.pop("if", None), node.pop("then", True), node.pop("else", True)
    if condition is not None and (then is not True or other is not True):
        _require_one(node, [{"allOf": [condition, then]}, {"allOf": [other], "not": condition}])


def _dependencies(node: Schema, _: Evaluated) -> None:
    for name, names in node.pop("dependentRequired", {}).items():
        if names:
            _require_one(node, [{"not": {"required": [name]}}, {"required": list(dict.fromkeys((*names, name)))}])
    for name, schema in node.pop("dependentSchemas", {}).items():
        if schema is not True:
            has_it = {"type": "object", "required": [name], "allOf": [schema]}
            _require_one(node, [{"not": {"type": "object"}}, {"not": {"required": [name]}}, has_it])


def _exactly_one(node: Schema, _: Evaluated) -> None:
    schemas = node.get("oneOf")
    if not isinstance(schemas, list) or len(schemas) > _MOST:
        return
    if len(schemas) > 1 and any(negated(one) is None for one in schemas):
        return  # llguidance may know that they exclude each other
    rest = [{"anyOf": [*schemas[:place], *schemas[place + 1 :]]} for place in range(len(schemas))]
    del node["oneOf"]
    _require_one(node, [{"allOf": [one], "not": other} for one, other in zip(schemas, rest, strict=True)])


def _contained(node: Schema, evaluated: Evaluated) -> None:
    least, most = node.pop("minContains", 1), node.pop("maxContains", None)
    if "contains" not in node or least > _MOST:
        return
    schema = node.pop("contains")
    if least:
        _require(node, {"prefixItems": [schema] * least, "minItems": least})
    if most is not None:
        first = max(least, most)
        evaluated.effort.spend(len("true, ") * first)
        _require(node, {"prefixItems": [True] * first, "items": {"not": schema}})
        if most < least:
            _require(node, negated({"type": "array"}))


def _names(node: Schema, evaluated: Evaluated) -> None:
    names = node.get("propertyNames")
    if names is True:
        del node["propertyNames"]
    elif names is False:
        del node["propertyNames"]
        _require(node, {"maxProperties": 0})
    elif isinstance(names, dict):
        allowed = _allowed_names(evaluated.resolved(names))
        if allowed is not None:
            del node["propertyNames"]
            _require(node, allowed | {"additionalProperties": False})


def _allowed_names(schema: Any) -> Schema | None:
    if not isinstance(schema, dict):
        return None
    said = {
        key: value for key, value in schema.items() if key not in ANNOTATIONS and (key, value) != ("type", "string")
    }
    if said.keys() == {"const"} or said.keys() == {"enum"}:
        values = said.get("enum", [said.get("const")])
        return {"properties": {value: True for value in values if isinstance(value, str)}}
    if said.keys() == {"pattern"}:
        return {"patternProperties": {said["pattern"]: True}}
    if said and said.keys() <= {"minLength", "maxLength"}:
        least, most = int(said.get("minLength", 0)), said.get("maxLength", "")
        return {"patternProperties": {f"^{ANY_TEXT}{{{least},{most if most == '' else int(most)}}}$": True}}
    return None


def _not(node: Schema, _: Evaluated) -> None:
    other = negated(node["not"]) if "not" in node else None
    if other is not None:
        del node["not"]
        _require(node, other)


def _unique(node: Schema, _: Evaluated) -> None:
    if node.get("uniqueItems") is False or node.get("maxItems", 2) < 2:
        node.pop("uniqueItems", None)


def _alternatives(node: Schema) -> list[tuple[Any, ...]]:
    """Of `anyOf` and `oneOf`: an instance fits all schemas of at least one of these."""
    combinations: list[tuple[Any, ...]] = [()]
    for keyword in ("anyOf", "oneOf"):
        combinations = (
            [(*some, one) for some in combinations for one in node.get(keyword, ())]
            if keyword in node
            else combinations
        )
    return combinations


def _unevaluated_properties(node: Schema, evaluated: Evaluated) -> None:
    def bound(rest: Any, own: Schema, some: tuple[Any, ...]) -> Schema:
        names = evaluated.properties(own)
        for one in some:
            names |= evaluated.properties(one)
        return {} if names.all else {**names.described(), "additionalProperties": rest}

    _evaluate(node, "unevaluatedProperties", bound)


def _unevaluated_items(node: Schema, evaluated: Evaluated) -> None:
    def bound(rest: Any, own: Schema, some: tuple[Any, ...]) -> Schema:
        count = max(evaluated.items(one) for one in (own, *some))
        if isinf(count):
            return {}
        return {"prefixItems": [True] * int(count), "items": rest} if count else {"items": rest}

    _evaluate(node, "unevaluatedItems", bound)


def _evaluate(node: Schema, keyword: str, bound: Callable[[Any, Schema, tuple[Any, ...]], Schema]) -> None:
    """Requires `bound` of each of the alternatives: of what is left to say of the rest, beside what the schema itself
    and the alternative evaluate."""
    if keyword not in node or len(node.get("anyOf", "_")) * len(node.get("oneOf", "_")) > _MOST:
        return
    alternatives = _alternatives(node)
    rest = node.pop(keyword)
    own = {key: value for key, value in node.items() if key not in ("anyOf", "oneOf")}
    rewritten = [{**bound(rest, own, some), **({"allOf": list(some)} if some else {})} for some in alternatives]
    _require(node, *([{"anyOf": rewritten}] if len(rewritten) > 1 else [one for one in rewritten if one]))


_RULES: tuple[Callable[[Schema, Evaluated], None], ...] = (
    _whole_numbers,
    _conditions,
    _unevaluated_properties,
    _unevaluated_items,
    _format,
    _dependencies,
    _exactly_one,
    _contained,
    _names,
    _not,
    _unique,
)
"""In this order: what is evaluated is told from the schema's own words."""
