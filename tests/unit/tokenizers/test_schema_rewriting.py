"""Schemas in words that llguidance knows: what the grammar takes, the schema allows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from penstock.tokenizers import lark
from penstock.tokenizers.grammars import GrammarError
from penstock.tokenizers.grammars.schemas import evaluated, rewritten
from support.grammars import BlindWriter

SCALARS: list[Any] = [None, True, False, 0, 1, 2, 2.5, "", "a", "ab", "b", "ba"]
INSTANCES: list[Any] = [
    *SCALARS,
    *([], [0], [1], ["a"], [1, "a"], ["a", 1], [0, 1, 2], ["a", "b"], [True, None, 1], [[1], "b"]),
    *({}, {"a": 1}, {"b": "a"}, {"a": "a"}, {"c": 0}, {"a": 1, "b": 1}, {"a": "ab", "b": "a"}, {"a": 1, "c": 2}),
    *({"b": 2, "c": "a"}, {"a": 0, "b": 2, "c": None}, {"a": {"a": 1}}, {"a": {"b": "a", "c": 1}}, {"ab": 1}),
]
NAMES = st.sampled_from(["a", "b", "c"])


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    several = st.lists(inner, min_size=1, max_size=3)
    named = st.dictionaries(NAMES, inner, max_size=2)
    count = st.integers(0, 3) | st.sampled_from([0.0, 1.0, 2.0])
    known: dict[str, st.SearchStrategy[Any]] = {
        "type": st.sampled_from(["object", "array", "string", "number", "integer", ["null", "object"], "boolean"]),
        "const": st.sampled_from(SCALARS),
        "enum": st.lists(st.sampled_from(SCALARS), min_size=1, max_size=3),
        "minimum": st.integers(0, 2),
        "exclusiveMaximum": st.integers(0, 2),
        "minLength": count,
        "maxLength": count,
        "required": st.lists(NAMES, max_size=2, unique=True),
        "properties": named,
        "additionalProperties": inner,
        "prefixItems": several,
        "items": inner,
        "maxItems": count,
        "anyOf": several,
        "allOf": several,
        "$ref": st.sampled_from(["#/$defs/a", "#/$defs/b"]),
    }
    others: dict[str, st.SearchStrategy[Any]] = {
        "oneOf": several,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "contains": inner,
        "minContains": count,
        "maxContains": count,
        "propertyNames": inner | st.sampled_from([{"enum": ["a", "b"]}, {"maxLength": 1}, {"pattern": "^a"}]),
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=2),
        "dependentSchemas": named,
        "unevaluatedProperties": inner,
        "unevaluatedItems": inner,
        "uniqueItems": st.booleans(),
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b$"]), inner, max_size=1),
    }
    every = known | others
    names = st.lists(st.sampled_from([*known, *others, *others]), min_size=1, max_size=4, unique=True)
    return names.flatmap(lambda some: st.fixed_dictionaries({name: every[name] for name in some}))


PLAIN = st.booleans() | st.sampled_from(
    [{"type": "string"}, {"type": "integer"}, {"const": 1}, {"const": "a"}, {"properties": {"a": {"const": 1}}}]
)
SCHEMAS = st.recursive(PLAIN, keywords, max_leaves=8)
ROOTS = st.tuples(keywords(SCHEMAS), SCHEMAS, SCHEMAS).map(lambda t: {**t[0], "$defs": {"a": t[1], "b": t[2]}})


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> BlindWriter:
    return BlindWriter(tmp_path_factory.mktemp("model"))


def taken(writer: BlindWriter, schema: Any) -> Iterator[Any]:
    for instance in INSTANCES:
        if writer.takes("json_schema", json.dumps(schema), json.dumps(instance)):
            yield instance


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(schema=ROOTS)
def test_what_a_grammar_takes_the_schema_allows(writer: BlindWriter, schema: dict[str, Any]) -> None:
    validator = Draft202012Validator(schema)
    try:
        for instance in taken(writer, schema):
            assert validator.is_valid(instance), (instance, rewritten(json.dumps(schema)))
    except (GrammarError, RecursionError):  # jsonschema does not end where a definition is its own condition
        pass


TAKEN: list[tuple[Any, list[Any], list[Any]]] = [
    ({"dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"b": 1, "a": 2}, 3], [{"a": 1}]),
    ({"dependentSchemas": {"a": {"required": ["b"]}}}, ["x", {"b": 1}], [{"a": 1}]),
    (
        {
            "type": "object",
            "properties": {"country": {"type": "string"}, "code": {"type": "string"}},
            "required": ["country", "code"],
            "if": {"properties": {"country": {"const": "US"}}},
            "then": {"properties": {"code": {"pattern": "^[0-9]{5}$"}}},
            "else": {"properties": {"code": {"maxLength": 3}}},
        },
        [{"country": "US", "code": "12345"}, {"country": "USA", "code": "abc"}, {"country": "U", "code": ""}],
        [{"country": "US", "code": "abc"}, {"country": "DE", "code": "12345"}],
    ),
    ({"enum": ["a", "b", 1], "not": {"enum": ["a", True]}}, ["b", 1], ["a"]),
    ({"type": "string", "not": {"enum": ["ab", "b]", ""]}}, ["a", "abc", "b", "b]]", "\n"], ["ab", "b]", ""]),
    ({"type": "number", "not": {"enum": [0, 2]}}, [1, -1, 0.5, 3], [0, 2]),
    ({"not": {"properties": {"a": {"const": 1}}}}, [{"a": 2}, {"a": "1", "c": 0}], [{"a": 1}, {}, 3]),
    ({"type": "array", "contains": {"const": 1}}, [[1], [1, 2]], [[], [2]]),
    (
        {"type": "array", "contains": {"const": 1}, "minContains": 2, "maxContains": 2.0},
        [[1, 1], [1, 1, 3]],
        [[1], [1, 2], [1, 1, 1]],
    ),
    ({"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"enum": ["a", "b"]}}}, [{"a": 1}, 2], [{"c": 1}]),
    ({"propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    (
        {"allOf": [{"$ref": "#/$defs/a"}], "properties": {"b": {}}, "unevaluatedProperties": False,
         "$defs": {"a": {"properties": {"a": {"type": "integer"}}}}},
        [{"b": 1}, {"a": 1}, {}],
        [{"c": 1}, {"a": "x"}],
    ),
    (
        {"anyOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"properties": {"b": {}}}],
         "unevaluatedProperties": {"type": "null"}},
        [{"a": 1}, {"a": 1, "c": None}, {"b": 1, "c": None}],
        [{"a": 2}, {"a": 1, "c": 2}],
    ),
    ({"prefixItems": [{"const": 1}], "unevaluatedItems": False}, [[1], []], [[1, 2], [2]]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5, "a"], [3, 1.5]),
    ({"format": "json-pointer"}, ["/a~0b", "", 3], ["a", "/~2"]),
    (True, [1, "a", {}], []),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), TAKEN)
def test_keywords_in_other_words(writer: BlindWriter, schema: Any, right: list[Any], wrong: list[Any]) -> None:
    text = json.dumps(schema)
    for instance in right:
        if isinstance(instance, float) or (isinstance(schema, dict) and "oneOf" in schema and instance == 2.5):
            continue  # where integers are forbidden, other numbers are left out as well
        assert writer.takes("json_schema", text, json.dumps(instance)), instance
    for instance in wrong:
        assert not writer.takes("json_schema", text, json.dumps(instance)), instance


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"pattern": "a"}},
        {"uniqueItems": True},
        {"if": {"$ref": "#/$defs/a"}, "then": {"const": 1}, "$defs": {"a": {"type": "integer"}}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "if": {"const": 1}, "then": {"const": 2}},
        {"items": {"$id": "other", "contains": {"const": 1}}},
        {"oneOf": [{"contains": {"const": 1}}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"contains": {"const": 1}}}},
        {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "object"}], "$defs": {"a": {"type": "array", "contains": True}}},
        {"if": 3, "then": [], "else": False},
        {"properties": 3, "unevaluatedProperties": False},
        {"propertyNames": {"maxLength": float("inf")}},
    ],
)
def test_what_cannot_be_said_is_refused(writer: BlindWriter, schema: Any) -> None:
    with pytest.raises(GrammarError):
        writer.takes("json_schema", json.dumps(schema), "1")


def test_refusals_speak_of_the_keywords_that_were_written(writer: BlindWriter) -> None:
    with pytest.raises(GrammarError, match='"if"'):
        writer.takes("json_schema", json.dumps({"if": {"pattern": "a"}, "then": {"minLength": 2}}), "1")


def test_schemas_inside_grammars(writer: BlindWriter) -> None:
    """As those of strict tools are."""
    schema = {"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}, "additionalProperties": False}
    grammar = f'start: "call " {lark.json_value(schema)}'
    assert writer.takes("grammar", grammar, 'call {"a":1,"b":2}')
    assert not writer.takes("grammar", grammar, 'call {"a":1}')
    with pytest.raises(GrammarError, match="dependentRequired"):
        writer.takes("grammar", f'{grammar} | %json {{"uniqueItems": true}}', "1")


def test_schemas_of_which_one_must_hold_stay_as_they_are() -> None:
    """Where one of them allowed less, an instance that fits two could seem to fit one."""
    one_of = [{"$ref": "#/$defs/a"}, {"contains": {"const": 1}}]
    other = rewritten(json.dumps({"oneOf": one_of, "contains": True, "$defs": {"a": {"type": "null"}}}))
    assert other is not None
    assert json.loads(other)["oneOf"] == one_of
    definition = {"type": "array", "contains": {"const": 1}}
    assert rewritten(json.dumps({"oneOf": one_of, "$defs": {"a": definition}})) is None


def nested(depth: int, keyword: str, **beside: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {keyword: schema, **beside}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(17, "if", then={"type": "object"}),
        nested(6, "contains", minContains=8),
        {"contains": {"type": "null"}, "maxContains": 10**9},
        {"contains": {"type": "null"}, "maxContains": 1e300},
        {"unevaluatedProperties": False, "allOf": [{"$ref": "#"}] * 8},
        {"allOf": [{"propertyNames": {"$ref": "#/$defs/n"}}] * 300, "$defs": {"n": {"enum": ["a" * 9000]}}},
    ],
)
def test_short_schemas_that_say_too_much(schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluated, "_MOST", 1 << 20)
    with pytest.raises(ValueError, match="too long"):
        rewritten(json.dumps(schema))


def test_alternatives_are_counted_before_they_are_combined() -> None:
    alternatives = {"anyOf": [True] * 3000, "oneOf": [True] * 3000}
    assert rewritten(json.dumps({**alternatives, "unevaluatedItems": False})) is None
