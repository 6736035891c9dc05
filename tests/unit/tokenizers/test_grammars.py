from __future__ import annotations

import json
import re
from typing import Any

import pytest

from helpers_grammars import BlindWriter
from penstock.tokenizers import StageChain, TextPart, find_reasoning_parser, lark, reasoning_parser_names
from penstock.tokenizers.grammars import GrammarError

CHOICES = '["yes", "no"]'

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["rose", "iris"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> BlindWriter:
    return BlindWriter(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("seed", range(5))
def test_a_schema(writer: BlindWriter, seed: int) -> None:
    found = json.loads(writer.write("json_schema", json.dumps(SCHEMA), seed))
    assert list(found) == ["kind", "count"]
    assert found["kind"] in ("rose", "iris")
    assert found["count"] in range(10)


@pytest.mark.parametrize("inside", [False, True])
def test_white_space_in_json(writer: BlindWriter, inside: bool) -> None:
    compact: dict[str, Any] = {"x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}}
    for more, loose in (({}, True), (compact, False)):
        schema = SCHEMA | more
        kind, grammar = (
            ("grammar", f"start: {lark.json_value(schema)}") if inside else ("json_schema", json.dumps(schema))
        )
        assert writer.takes(kind, grammar, '{"kind":"rose","count":1}')
        assert writer.takes(kind, grammar, '{\n  "kind": "rose",\n  "count": 1\n}') == loose


@pytest.mark.parametrize(
    ("kind", "grammar", "pattern"),
    [
        ("regex", "[a-c]{2,4}(x|yy)", "[a-c]{2,4}(x|yy)"),
        ("regex", "[^e]{12}", "[^e]{12}"),
        ("choice", json.dumps(["a", "ab", 'quo"ted\\', "ü\n"]), 'a|ab|quo"ted\\\\|ü\n'),
        ("grammar", 'start: "x" /[0-9]+/ "."', r"x[0-9]+\."),
        ("grammar", 'root ::= "x" digits "."\ndigits ::= [0-9]+', r"x[0-9]+\."),
    ],
)
def test_other_kinds(writer: BlindWriter, kind: str, grammar: str, pattern: str) -> None:
    for seed in range(5):
        assert re.fullmatch(pattern, writer.write(kind, grammar, seed), re.DOTALL)


@pytest.mark.parametrize(
    ("kind", "grammar"),
    [
        ("json_schema", '{"type": "rose"}'),
        ("json_schema", '{"type": "object", "unheardOf": 1, "properties": 5}'),
        ("json_schema", '{"$ref": "https://example.org/schema"}'),
        ("json_schema", '{"$ref": "#/$defs/none"}'),
        ("json_schema", json.dumps({"type": "string", "pattern": "(("})),
        ("regex", "(("),
        ("grammar", "start: nowhere"),
        ("grammar", "root ::= nowhere"),
        ("grammar", "\x00"),
    ],
)
def test_what_makes_no_grammar(writer: BlindWriter, kind: str, grammar: str) -> None:
    with pytest.raises(GrammarError) as caught:
        writer.write(kind, grammar, 0)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", reasoning_parser_names())
def test_thoughts_are_free_and_answers_are_not(writer: BlindWriter, name: str) -> None:
    parser = find_reasoning_parser(name)
    assert parser.frame is not None
    thought, preface = parser.frame("")
    assert thought is not None
    begin, end = thought
    for text, is_right in ((f"{begin}Hm {{.{end}{preface}yes", True), (f"{begin}Hm.{end}{preface}maybe", False)):
        assert writer.takes("choice", CHOICES, text, thought, preface) == is_right
        chain = StageChain([parser("")])
        parts = [*chain.push(text), *chain.flush()]
        answer = "".join(part.text for part in parts if isinstance(part, TextPart))
        assert answer.strip() == ("yes" if is_right else "maybe")
    if begin:
        assert writer.takes("choice", CHOICES, f"{preface}no", thought, preface)
    assert writer.write("choice", CHOICES, 0, None, preface).removeprefix(preface).strip() in ("yes", "no")
