"""Values inside of text: where they end, and what JSON becomes of them."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.tokenizers.parsing import Tags
from penstock.tokenizers.parsing.literals import (
    parameter_types,
    quoted,
    read_literal,
    read_name,
    read_value,
    typed_json,
)
from penstock.tokenizers.tool_calls.gemma import read_arguments
from support.reading import read, written

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(value=json_values, indent=st.none() | st.just(1), ascii_only=st.booleans())
def test_the_end_of_a_json_value_is_found(value: object, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert written(read_value, text + "</end>") == (text, "</end>")


@pytest.mark.parametrize(
    ("text", "rest"),
    [('{"a": 1', ""), ('{"a"</b>', "</b>"), ('{"a": [1}', "}"), ("<", "<"), ("", ""), ('"a\\', ""), ("[" * 50, "")],
)
def test_what_is_no_json_stays_unread(text: str, rest: str) -> None:
    assert written(read_value, text) == (None, rest)


@pytest.mark.parametrize(
    ("text", "name"),
    [('"a\\"\\u00e9"', 'a"é'), ('""', ""), ("a", None), ('"\\ud800"', None), ('"\\x"', None), ('"' + 300 * "a", None)],
)
def test_a_name_is_a_whole_json_string_of_bounded_length(text: str, name: str | None) -> None:
    assert read(read_name, list(text))[0] == name


python_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(value=python_values)
@example(value="\U0001f600 \x00 \x7f '\"")
def test_python_literals_become_the_json_of_their_values(value: Any) -> None:
    for text in (repr(value), ascii(value)):
        found, rest = written(read_literal, text + " ;")
        assert found is not None
        assert json.loads(found) == json.loads(json.dumps(value))
        assert rest.strip() == ";"


@pytest.mark.parametrize("text", [r"'a\n\t\\\'\x41é\U0001F600'", '"""a"b\n"""', "''", "{'a': (1, 2,),}", "true"])
def test_python_literals_as_models_write_them(text: str) -> None:
    value = True if text == "true" else ast.literal_eval(text)
    assert json.loads(written(read_literal, text)[0] or "") == json.loads(json.dumps(value))


@pytest.mark.parametrize(
    "text",
    ["", "'a", "'a\\", "'\\xg'", "'\\U00110000'", "f(1)", "b'a'", "1+2", "{1: 2}", "{'a' 1}", "[1 2]", "[" * 100, "a"],
)
def test_what_is_no_python_literal(text: str) -> None:
    assert written(read_literal, text)[0] is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", "{}"),
        ("{a:1,b:<q>x,y}<q>}", '{"a": 1, "b": "x,y}"}'),
        ("{a : { b : [ true , -1.5 , <q><q> ] } }", '{"a": {"b": [true, -1.5, ""]}}'),
        ("{<q>a b<q>:null,c:word 7}", '{"a b": null, "c": "word 7"}'),
        ("{a:1", None),
        ("{a:<q>1", None),
        ("{a}", None),
        ("{:1}", None),
        ("{a:}", None),
        ("{a:[" + 40 * "[", None),
        ("a", None),
    ],
)
def test_arguments_of_gemma(text: str, expected: str | None) -> None:
    assert written(lambda reader, write: read_arguments(reader, write, Tags("<q>")), text)[0] == expected


def test_surrogates_are_escaped_so_that_the_text_can_be_encoded() -> None:
    assert quoted("\ud800ä").encode() == b'"\\ud800\\u00e4"'
    assert written(read_literal, "'\\ud83d\\ude00'")[0] == '"\\ud83d\\ude00"'


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "12", '"12"'),
        ({"type": "string"}, '"a"', r'"\"a\""'),
        ({"type": "integer"}, " 12 ", "12"),
        ({"type": "integer"}, "1.5", '"1.5"'),
        ({"type": "number"}, "12", "12"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "boolean"}, "False", "false"),
        ({"type": "boolean"}, "true", "true"),
        ({"type": "boolean"}, "1", '"1"'),
        ({"type": "object"}, "{'a': [True]}", '{"a": [true]}'),
        ({"type": "array"}, "[1, 2] or so", '"[1, 2] or so"'),
        ({"type": "array"}, "[" * 100_000, quoted("[" * 100_000)),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"type": ["string", "null"]}, "5", '"5"'),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", "null"),
        ({"oneOf": [{"type": "integer"}, {}]}, "[1]", "[1]"),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"enum": [1, 2]}, "1", "1"),
        ({"type": "whatever"}, "5", "5"),
        ({}, "5", "5"),
        ({}, "Oslo", '"Oslo"'),
        ({}, '"Oslo"', r'"\"Oslo\""'),
        ({}, "9" * 5000, quoted("9" * 5000)),
    ],
)
def test_values_get_the_types_of_the_schema(schema: dict[str, Any], text: str, expected: str) -> None:
    types = parameter_types({"properties": {"a": schema}})["a"]
    assert typed_json(text, types) == expected


def test_schemas_within_schemas_end_somewhere() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(2000):
        schema = {"anyOf": [schema]}
    assert parameter_types({"properties": {"a": schema}}) == {"a": frozenset()}
