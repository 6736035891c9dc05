"""Grammars that TensorRT-LLM follows itself."""

from __future__ import annotations

import json

import pytest

from penstock.engines.contract.messages import Grammar, Thought, ThoughtBudget
from penstock.engines.errors import UnsupportedError
from penstock.engines.tensorrt_llm.sampling import guide

CHOICES = '["yes", "no \\"way\\""]'


@pytest.mark.parametrize(
    ("grammar", "backend", "expected"),
    [
        (Grammar("regex", "a+"), "llguidance", {"regex": "a+"}),
        (Grammar("grammar", "start: /a/"), "llguidance", {"grammar": "start: /a/"}),
        (Grammar("choice", CHOICES), "llguidance", {"grammar": 'start: "yes" | "no \\"way\\""'}),
        (Grammar("choice", CHOICES), "xgrammar", {"grammar": 'root ::= "yes" | "no \\"way\\""'}),
        (Grammar("json_schema", '{"type":"null"}'), "xgrammar", {"json": '{"type": "null"}'}),
    ],
)
def test_a_grammar_becomes_the_guide_that_its_backend_reads(grammar, backend, expected):
    assert guide(grammar, backend) == expected


def test_llguidance_is_told_to_refuse_what_it_does_not_know():
    schema = json.loads(guide(Grammar("json_schema", '{"type":"null"}'), "llguidance")["json"])
    assert schema["x-guidance"]["lenient"] is False
    assert schema["x-guidance"]["whitespace_pattern"]


BUDGET = ThoughtBudget(12, ("<think>",), ("</think>",), "</think>", inside=True, again=False)


@pytest.mark.parametrize("behind", [{"thought": Thought("", "</think>")}, {"preface": "Answer: "}, {"budget": BUDGET}])
def test_answers_behind_thoughts_are_refused(behind):
    with pytest.raises(UnsupportedError, match="behind a thought"):
        guide(Grammar("regex", "a", **behind), "llguidance")


def test_requests_take_their_guides_along(make):
    engine = make(engine_args={"guided_decoding_backend": "llguidance"})
    assert engine.batcher.info.supports_grammars
    assert not engine.llm.args.skip_tokenizer_init
    asked = []
    generate = engine.llm.generate_async
    engine.llm.generate_async = lambda **given: asked.append(given["sampling_params"]) or generate(**given)
    engine.finish(engine.start([5, 6], grammar=Grammar("regex", "a+")), engine.start([5, 6, 7]))
    assert [given.guided_decoding and given.guided_decoding.regex for given in asked] == ["a+", None]


def test_without_a_backend_there_are_no_grammars(engine):
    assert not engine.batcher.info.supports_grammars


def test_a_schema_that_would_take_all_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="multipleOf"):
        guide(Grammar("json_schema", '{"type": "integer", "multipleOf": 1000003}'), "llguidance")


def test_long_numbers_are_not_left_to_llguidance() -> None:
    grammar = Grammar("json_schema", '{"type": "integer", "maximum": 9223372036854775807}')
    assert guide(grammar, "llguidance")["grammar"].startswith("start: ")
    assert json.loads(guide(grammar, "xgrammar")["json"])["maximum"] == 9223372036854775807
