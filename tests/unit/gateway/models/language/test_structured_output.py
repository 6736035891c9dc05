"""From what callers say an output has to be to the engine's grammars."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from penstock.engines.contract.messages import Grammar
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import InvalidRequestError, PenstockError, UnsupportedError
from penstock.gateway.models.language.sampling import SamplingFields, sampling_params
from penstock.gateway.models.language.structured_output import MAX_CHOICES, MAX_GRAMMAR_CHARS, wanted_grammar
from penstock.kvcache import KVGroup

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
OBJECT = Grammar("json_schema", '{"type":"object"}')
FORMAT = "response_format"
OUTPUTS = "structured_outputs"
TAG: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}, {"begin": "<g/", "schema": True, "end": ""}],
    "triggers": ["<f", "<g"],
}


def fields(**given: Any) -> SamplingFields:
    return msgspec.convert(given, SamplingFields)


def schema_format(schema: Any, **others: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **others}}


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({FORMAT: schema_format(SCHEMA)}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
        ({FORMAT: schema_format(SCHEMA, strict=False)}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
        ({FORMAT: schema_format(True)}, "json_schema", "{}"),
        ({FORMAT: schema_format(None)}, "json_schema", OBJECT.text),
        ({FORMAT: {"type": "json_object"}}, "json_schema", OBJECT.text),
        ({FORMAT: {"type": "json_object", "schema": SCHEMA}}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
        ({FORMAT: {"type": "json_schema", "schema": True}}, "json_schema", "{}"),
        ({OUTPUTS: {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
        ({OUTPUTS: {"json": json.dumps(SCHEMA)}}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
        ({OUTPUTS: {"json_object": True}}, "json_schema", OBJECT.text),
        ({OUTPUTS: {"regex": "a+"}}, "regex", "a+"),
        ({OUTPUTS: {"regex": "a", "json_object": False}}, "regex", "a"),
        ({OUTPUTS: {"choice": ["a", "ö"]}}, "choice", '["a","ö"]'),
        ({OUTPUTS: {"grammar": "start: /a/"}}, "grammar", "start: /a/"),
        ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
        ({"guided_json": "{}"}, "json_schema", "{}"),
        ({"guided_regex": "[0-9]"}, "regex", "[0-9]"),
        ({"guided_choice": ["x"]}, "choice", '["x"]'),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({FORMAT: {"type": "text"}, "guided_regex": "b"}, "regex", "b"),
        ({OUTPUTS: {"regex": "a" * MAX_GRAMMAR_CHARS}}, "regex", "a" * MAX_GRAMMAR_CHARS),
    ],
)
def test_what_is_meant(given: dict[str, Any], kind: Any, text: str) -> None:
    assert wanted_grammar(fields(**given)) == (Grammar(kind, text), next(name for name in reversed(given)))


@pytest.mark.parametrize("given", [{}, {FORMAT: {"type": "text"}}])
def test_what_means_nothing(given: dict[str, Any]) -> None:
    assert wanted_grammar(fields(**given)) is None


def test_compact_json_has_no_space() -> None:
    found = wanted_grammar(fields(structured_outputs={"json": SCHEMA, "disable_any_whitespace": True}))
    assert found is not None
    schema = json.loads(found[0].text)
    assert schema.pop("x-guidance") == {"whitespace_flexible": False, "whitespace_pattern": None}
    assert schema == SCHEMA


@pytest.mark.parametrize("given", [{FORMAT: TAG}, {OUTPUTS: {"structural_tag": json.dumps(TAG)}}])
def test_structural_tags(given: dict[str, Any]) -> None:
    found = wanted_grammar(fields(**given))
    assert found is not None
    rules = found[0].text.split("\n")
    assert rules[:2] == ["start: (part_0 | part_1)* TEXT", r"TEXT: /(.|\n)*/"]
    assert rules[2].startswith('part_0: trigger_0 ">" %json {"type": "object"')
    assert rules[2].endswith(' "</f>"')
    assert rules[3].startswith('part_1: trigger_1 "/" %json {"x-guidance"')
    assert rules[4:] == [r"trigger_0[lazy]: /(.|\n)*<f/", r"trigger_1[lazy]: /(.|\n)*<g/"]


def tag(**changed: Any) -> dict[str, Any]:
    return {FORMAT: TAG | changed}


LONG = "a" * (MAX_GRAMMAR_CHARS + 1)
DEEP = '{"a":' * 20_000 + "1" + "}" * 20_000
WRONG: list[tuple[dict[str, Any], str]] = [
    ({FORMAT: {"type": "xml"}}, "response_format.type"),
    ({FORMAT: {"type": "json_schema"}}, "response_format.json_schema"),
    ({FORMAT: schema_format(False)}, "response_format.json_schema.schema"),
    ({FORMAT: schema_format({"description": LONG})}, "response_format.json_schema.schema"),
    (tag(structures=None), FORMAT),
    (tag(structures=[]), FORMAT),
    (tag(triggers=[]), FORMAT),
    (tag(triggers=["<f", "<g", ""]), FORMAT),
    (tag(triggers=["<f"]), "response_format.structures[1].begin"),
    (tag(triggers=["<f", "<g"] * MAX_CHOICES), FORMAT),
    (tag(structures=TAG["structures"] * MAX_CHOICES), FORMAT),
    (tag(structures=[{"begin": "<f>", "schema": False, "end": ""}]), "response_format.structures[0].schema"),
    ({OUTPUTS: {}}, OUTPUTS),
    ({OUTPUTS: {"json_object": False}}, OUTPUTS),
    ({OUTPUTS: {"disable_any_whitespace": True}}, OUTPUTS),
    ({OUTPUTS: {"json": "{"}}, "structured_outputs.json"),
    ({OUTPUTS: {"json": "[]"}}, "structured_outputs.json"),
    ({OUTPUTS: {"json": "3"}}, "structured_outputs.json"),
    ({OUTPUTS: {"json": False}}, "structured_outputs.json"),
    ({OUTPUTS: {"json": "false"}}, "structured_outputs.json"),
    ({OUTPUTS: {"json": DEEP}}, "structured_outputs.json"),
    ({OUTPUTS: {"regex": ""}}, "structured_outputs.regex"),
    ({OUTPUTS: {"regex": LONG}}, "structured_outputs.regex"),
    ({OUTPUTS: {"choice": []}}, "structured_outputs.choice"),
    ({OUTPUTS: {"choice": ["a", ""]}}, "structured_outputs.choice"),
    ({OUTPUTS: {"choice": ["a"] * (MAX_CHOICES + 1)}}, "structured_outputs.choice"),
    ({OUTPUTS: {"choice": [LONG]}}, "structured_outputs.choice"),
    ({OUTPUTS: {"grammar": ""}}, "structured_outputs.grammar"),
    ({OUTPUTS: {"structural_tag": "no JSON"}}, "structured_outputs.structural_tag"),
    ({OUTPUTS: {"structural_tag": "[]"}}, "structured_outputs.structural_tag"),
    ({OUTPUTS: {"structural_tag": '{"type": 1}'}}, "structured_outputs.structural_tag.type"),
    ({OUTPUTS: {"structural_tag": "{}"}}, "structured_outputs.structural_tag.type"),
    (
        {OUTPUTS: {"structural_tag": '{"type":"json_object","schema":' + DEEP + "}"}},
        "structured_outputs.structural_tag",
    ),
    ({OUTPUTS: {"structural_tag": '{"type": "structural_tag"}'}}, "structured_outputs.structural_tag"),
    ({OUTPUTS: {"structural_tag": '{"type": "text"}'}}, OUTPUTS),
    ({OUTPUTS: {"regex": "a", "choice": ["a"]}}, OUTPUTS),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": DEEP}, "guided_json"),
    ({"guided_json": False}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": LONG}, "guided_grammar"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({FORMAT: {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({FORMAT: {"type": "json_object"}, OUTPUTS: {"regex": "a"}}, OUTPUTS),
]


@pytest.mark.parametrize(("given", "param"), WRONG, ids=[f"{n}-{param}" for n, (_, param) in enumerate(WRONG)])
def test_what_is_wrong_is_named(given: dict[str, Any], param: str) -> None:
    with pytest.raises(PenstockError) as caught:
        wanted_grammar(fields(**given))
    assert isinstance(caught.value, InvalidRequestError | UnsupportedError)
    assert caught.value.param == param
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "given",
    [
        {FORMAT: {"type": "json_object"}},
        {OUTPUTS: {"regex": "a"}},
        {"guided_json": SCHEMA},
    ],
)
def test_engines_without_grammars_say_so(given: dict[str, Any]) -> None:
    info = ModelInfo(
        vocab_size=10, max_model_len=10, kv_groups=(KVGroup(16),), num_blocks=1, eos_token_ids=(), runner="none"
    )
    with pytest.raises(UnsupportedError) as caught:
        sampling_params(fields(**given), info, {}, max_tokens=1, logprobs=None)
    assert caught.value.param == next(iter(given))
    able = msgspec.structs.replace(info, supports_grammars=True)
    assert sampling_params(fields(**given), able, {}, max_tokens=1, logprobs=None).grammar is not None
