"""Whole numbers above 2**53 in schemas hold exactly, wherever they are, though llguidance computes in f64."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.tokenizers import lark
from penstock.tokenizers.grammars import GrammarError
from penstock.tokenizers.grammars.schemas import with_exact_numbers
from penstock.tokenizers.grammars.schemas.exact_numbers import Bound, integers_between, numbers_between
from support.grammars import BlindWriter

INT64, UINT64, ODD = 2**63 - 1, 2**64 - 1, 2**53 + 1
ID = {"type": "integer", "minimum": -INT64 - 1, "maximum": INT64}
COUNT = {"type": "integer", "minimum": 0, "maximum": UINT64}
SMALL = (None, -101, -100, -99, -57, -10, -9, -1, 0, 1, 9, 10, 11, 57, 99, 100, 101)


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> BlindWriter:
    return BlindWriter(tmp_path_factory.mktemp("vocabulary"))


@pytest.mark.parametrize("low", SMALL)
def test_patterns_of_small_bounds(low: int | None) -> None:
    for high in SMALL:
        check_patterns(low, high)


def check_patterns(low: int | None, high: int | None) -> None:
    integers = re.compile(integers_between(low, high) or "(?!)")
    for number in range(-130, 131):
        inside = (low is None or low <= number) and (high is None or number <= high)
        assert bool(integers.fullmatch(str(number))) == inside, (low, high)
    assert not any(map(integers.fullmatch, ("-0", "01", "+1", "1.0", "")))
    for out_low, out_high in product((False, True), repeat=2):
        bounds = [None if value is None else Bound(value, out) for value, out in ((low, out_low), (high, out_high))]
        numbers = re.compile(numbers_between(*bounds) or "(?!)")
        for whole, rest in product((0, 1, 9, 10, 56, 57, 58, 99, 100, 101, 102), ("", ".0", ".00", ".5", ".05")):
            for text in (f"{whole}{rest}", f"-{whole}{rest}"):
                value = Fraction(text)
                above = low is None or value > low or (value == low and not out_low)
                below = high is None or value < high or (value == high and not out_high)
                minus_zero = value == 0 and text.startswith("-")
                assert bool(numbers.fullmatch(text)) == (above and below and not minus_zero), (low, high)


@given(*[st.integers(-(2**70), 2**70)] * 3)
def test_patterns_of_large_bounds(one: int, other: int, number: int) -> None:
    low, high = sorted((one, other))
    pattern = re.compile(integers_between(low, high) or "(?!)")
    for near in (low - 1, low, low + 1, high - 1, high, high + 1, number):
        assert bool(pattern.fullmatch(str(near))) == (low <= near <= high)


NODE = {"properties": {"v": COUNT, "next": {"$ref": "#/$defs/Node"}}, "required": ["v"], "additionalProperties": False}
OBJECT: dict[str, Any] = {
    "type": "object",
    "title": "Row",
    "properties": {"id": ID, "n": {"type": "string"}, "u": {"anyOf": [COUNT, {"type": "null"}]}},
    "required": ["id"],
}
CASES: list[tuple[Any, list[Any], list[Any]]] = [
    (ID, [INT64, -INT64 - 1, 0, -1], [INT64 + 1, -INT64 - 2, "1.0", "-", "01"]),
    (COUNT, [UINT64, UINT64 - 1, 2**63, 0], [UINT64 + 1, -1, 10 * UINT64]),
    ({"type": "integer", "format": "int64", "exclusiveMaximum": ODD}, [ODD - 1, -(10**30)], [ODD, ODD + 1]),
    ({"type": "integer", "exclusiveMinimum": ODD, "minimum": 5}, [ODD + 1, 10**30], [ODD, ODD - 1, 6]),
    ({"type": "integer", "minimum": 0.5, "maximum": ODD}, [1, ODD], [0, ODD + 1]),
    ({"type": "integer", "minimum": 1e19}, [10**19, 10**19 + 1], [10**19 - 1, INT64]),
    ({"type": "number", "maximum": ODD}, [ODD, f"{ODD}.0", f"{ODD - 1}.9", -1.5], [f"{ODD}.1", ODD + 1]),
    ({"type": "number", "exclusiveMinimum": -ODD}, [f"-{ODD - 1}.99", 3], [-ODD, f"-{ODD}.0", -ODD - 1]),
    ({"const": ODD}, [ODD], [ODD - 1, ODD + 1]),
    ({"type": "integer", "enum": [1, ODD, UINT64]}, [1, ODD, UINT64], [2, ODD - 1, UINT64 + 1]),
    ({"enum": ["a", None, [ODD, {"x": UINT64}]]}, ['"a"', "null", [ODD, {"x": UINT64}]], [[ODD], "1"]),
    (
        {"type": ["integer", "null", "string"], "maximum": ODD, "maxLength": 2},
        [ODD, "null", '"ab"'],
        [ODD + 1, '"abc"'],
    ),
    (
        {**OBJECT, "additionalProperties": False},
        [{"id": INT64}, {"id": 1, "n": "x"}, {"id": 1, "u": UINT64}, {"id": 1, "n": "", "u": None}, '{ "id" : 5 }'],
        [
            {"id": INT64 + 1},
            {},
            {"n": "x"},
            {"id": 1, "z": 1},
            {"id": 1, "u": UINT64 + 1},
            {"u": 1, "id": 1},
            '{"id":1,}',
        ],
    ),
    (
        OBJECT,
        [{"id": 1}, {"id": 1, "z": {"a": []}}, {"id": 1, "n": "", "z": 1, "id2": 2}],
        [{}, '{"id":1,"id":2}', '{"id":1,"z":1,"n":""}', '{"z":1}'],
    ),
    (
        {**OBJECT, "required": []},
        [{}, {"id": 1}, {"n": ""}, {"u": UINT64}, {"n": "", "u": 1}, {"z": 1, "y": 2}],
        [{"u": UINT64 + 1}, '{,"n":""}', '{"n":"" "u":1}'],
    ),
    ({"type": "object", "additionalProperties": ID}, [{}, {"a": INT64, "b": 1}], [{"a": INT64 + 1}, {"a": "x"}]),
    ({"type": "object", "required": ["a"], "additionalProperties": ID}, [{"a": INT64}], [{}, {"a": "x"}]),
    ({"type": "array", "items": ID}, [[], [INT64], [1, INT64, 2]], [[INT64 + 1], "[1 2]", "[,]"]),
    ({"type": "array", "items": ID, "minItems": 2, "maxItems": 3}, [[1, INT64], [1, 2, 3]], [[], [1], [1, 2, 3, 4]]),
    ({"type": "array", "items": ID, "maxItems": 1}, [[], [1]], [[1, 2]]),
    (
        {"$defs": {"Node": {"type": "object", **NODE}}, "$ref": "#/$defs/Node"},
        [{"v": UINT64}, {"v": 1, "next": {"v": UINT64, "next": {"v": 0}}}],
        [{"v": UINT64 + 1}, {"v": 1, "next": {"v": UINT64 + 1}}, {"v": 1, "next": {}}],
    ),
    (
        {
            "$defs": {"T": {"type": "array", "items": {"$ref": "#/$defs/S"}}, "S": {"type": "string"}, "I": ID},
            "type": "object",
            "properties": {"t": {"$ref": "#/$defs/T"}, "i": {"$ref": "#/$defs/I"}},
        },
        [{"t": ["x"], "i": INT64}],
        [{"t": [1]}, {"i": INT64 + 1}],
    ),
    # llguidance's words alone: nothing more is allowed, and a little less.
    ({"allOf": [ID]}, [2**63 - 1024, -(2**63 - 1024)], [INT64 + 1, -INT64 - 2]),
    ({**COUNT, "multipleOf": 5}, [10, 5 * 10**17], [11, UINT64 + 5]),
    ({"type": "object", "properties": {"a": COUNT}, "maxProperties": 1, "required": ["a"]}, [{"a": 5}], [{"a": -1}]),
    ({"type": "object", "patternProperties": {"^a": {"type": "number", "maximum": ODD}}}, [{"a": 5}], [{"a": ODD + 1}]),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), CASES, ids=[json.dumps(case[0])[:60] for case in CASES])
def test_what_a_schema_allows(writer: BlindWriter, schema: Any, right: list[Any], wrong: list[Any]) -> None:
    grammars = [("json_schema", json.dumps(schema)), ("grammar", f'start: "" %json {json.dumps(schema)}')]
    for value in (*right, *wrong):
        text = value if isinstance(value, str) else json.dumps(value)
        taken = [writer.takes(kind, grammar, text) for kind, grammar in grammars]
        assert taken == [any(value is each for each in right)] * 2, text


def test_a_tool_s_arguments(writer: BlindWriter) -> None:
    """Other schemas of a grammar stay, and what it says of white space and of unknown keywords holds."""
    loose = {"type": "object", "properties": {"id": ID}, "required": ["id"], "additionalProperties": False, "x": 1}
    schema = lark.json_value(loose, lenient=True)
    compact = lark.guided_schema(ID | {"x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}})
    grammar = f'start: "a" {schema} | "b" %json {json.dumps(compact)} | "c" %json {{"type": "null"}}'
    assert writer.takes("grammar", grammar, f'a{{"id": {2**63 - 1024}}}')
    assert not writer.takes("grammar", grammar, f'a{{"id": {INT64 + 1}}}')
    assert writer.takes("grammar", grammar, f"b{INT64}")
    assert not writer.takes("grammar", grammar, f"b{INT64 + 1}")
    assert writer.takes("grammar", grammar, "cnull")


def test_no_white_space_where_none_is_wanted(writer: BlindWriter) -> None:
    schema = OBJECT | {"x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}}
    assert writer.takes("json_schema", json.dumps(schema), '{"id":1,"n":"x"}')
    assert not writer.takes("json_schema", json.dumps(schema), '{"id": 1}')


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"const": ODD}]},
        {"allOf": [{"enum": [1, [ODD]]}]},
        {"allOf": [{"type": "integer", "minimum": 2**63}]},
        {"allOf": [{"type": "integer", "exclusiveMaximum": -(2**70)}]},
        {"type": "integer", "minimum": 10**400},
        {"type": "integer", "minimum": INT64, "maximum": 5},
    ],
)
def test_what_cannot_be_kept_is_refused(writer: BlindWriter, schema: Any) -> None:
    with pytest.raises(GrammarError, match="is a number that is too large to be kept exactly in its place"):
        writer.compiled("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        *({"type": "integer", "maximum": bound} for bound in (5, 2**53, -(2**53), 2**62, 1e18)),
        *({"const": 10**15}, {"type": "string", "default": "9007199254740993"}, [ID], True),
        {"properties": {"maximum": {"type": "string"}}, "description": "0123456789012345"},
    ],
)
def test_schemas_without_such_numbers_stay(schema: Any) -> None:
    text = json.dumps(schema)
    assert with_exact_numbers("json_schema", text) == ("json_schema", text)
    assert with_exact_numbers("grammar", f"start: %json {text}")[1] == f"start: %json {text}"


@pytest.mark.parametrize("text", ["{", '{"maximum": 9223372036854775807', '{"enum": 9223372036854775807}', "null"])
def test_what_is_no_schema_stays(text: str) -> None:
    assert with_exact_numbers("json_schema", text) == ("json_schema", text)


ODD_SCHEMAS = [
    {"properties": [ODD]},
    {"properties": {"a": ID}, "required": [[1], 2]},
    {"required": 5, "properties": {"a": ID}},
    {"anyOf": {"a": ID}},
    {"anyOf": []},
    {"items": [ID]},
    {"items": ID, "minItems": "x"},
    {"$ref": 5},
    {"$ref": "#/$defs/none"},
    {"$ref": "http://example.com/x"},
    {"$defs": [ID], "$ref": "#/$defs/0"},
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"maximum": True, "minimum": ODD},
    {"x-guidance": 5},
    {"x-guidance": {"item_separator": ";"}},
    {"type": 5},
    {"type": [5]},
    {"enum": {}},
]


@pytest.mark.parametrize("odd", ODD_SCHEMAS)
@pytest.mark.parametrize("kind", ["object", "array", "integer", None])
def test_odd_schemas_are_refused_or_followed(writer: BlindWriter, odd: dict[str, Any], kind: str | None) -> None:
    for schema in (odd, {"type": "object", "properties": {"a": odd, "b": ID}}):
        whole = ({"type": kind} if kind else {}) | ID | schema
        with suppress(GrammarError):
            writer.compiled("json_schema", json.dumps(whole))


def test_what_schemas_cost_is_bounded(writer: BlindWriter) -> None:
    """Definitions are repeated with each schema that refers to them."""
    words = {f"d{number}": {"type": "string", "description": "x" * 100} for number in range(500)}
    properties = {f"p{number}": {"$ref": f"#/$defs/d{number}"} for number in range(500)}
    schema = {"$defs": words, "type": "object", "properties": {**properties, "id": {"type": "integer", "maximum": ODD}}}
    kind, text = with_exact_numbers("json_schema", json.dumps(schema))
    assert kind == "json_schema"
    assert len(text) < 2 * len(json.dumps(schema))
    assert json.loads(text)["properties"]["id"]["maximum"] == ODD - 1


def test_a_long_chain_of_references() -> None:
    chain = {f"d{number}": {"anyOf": [{"$ref": f"#/$defs/d{number + 1}"}]} for number in range(3000)}
    schema = {"$defs": {**chain, "d3000": ID}, "$ref": "#/$defs/d0"}
    kind, text = with_exact_numbers("json_schema", json.dumps(schema))
    assert (kind, text.count("\n") > 3000) == ("grammar", True)
