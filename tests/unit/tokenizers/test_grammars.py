from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.tokenizers import StageChain, TextPart, find_reasoning_parser, lark, reasoning_parser_names
from penstock.tokenizers.errors import TokenizerError
from penstock.tokenizers.grammars import GrammarCompiler, GrammarError, compiler
from penstock.tokenizers.reasoning import ReasoningParser
from support.grammars import BlindWriter, allowed_next
from support.models import make_tokenizer

THINK = ("<think>", "</think>")

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


@pytest.mark.parametrize("text", ["<|im_end|>", "a<think>b", "</think>"])
@pytest.mark.parametrize("special", [False, True])
def test_text_of_special_tokens_is_text(tmp_path: Path, text: str, special: bool) -> None:
    writer = BlindWriter(tmp_path, THINK, special=special)
    for kind, grammar, written in (
        ("choice", json.dumps([text]), text),
        ("json_schema", json.dumps({"const": text}), json.dumps(text)),
        ("regex", re.escape(text), text),
        ("regex", "".join(f"[{character}]" for character in text), text),
        ("grammar", "start: " + " ".join(json.dumps(character) for character in text), text),
        ("json_schema", json.dumps({"const": text}).replace("<", "\\u003c"), json.dumps(text)),
        ("grammar", f"start: {lark.literal(text, {})}", text),
    ):
        assert writer.write(kind, grammar, 0) == written
        assert writer.write(kind, grammar, 0, ("<think>", "</think>"), "", begun=writer.token_ids("<think>a</think>"))


@pytest.mark.parametrize("length", [2, 7])
def test_an_output_goes_on_where_it_was(writer: BlindWriter, length: int) -> None:
    begun = writer.token_ids("abcdefgh"[:length])
    assert writer.write("regex", "[a-z]{8}", 0, begun=begun).startswith("abcdefgh"[:length])
    assert not writer.takes("regex", "[a-z]{8}", "abcdefghi")


def test_a_matcher_that_is_given_what_it_forbids(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    compiled = GrammarCompiler(tmp_path, 300, [2]).compile("regex", "ab")
    a, b = make_tokenizer().encode("ab")
    right, wrong, ended = compiled.start([a]), compiled.start([b]), compiled.start([a, b, b])
    assert (right.problem, right.is_complete) == ("", False)
    assert wrong.problem
    assert not wrong.is_complete
    assert (ended.problem, ended.is_complete) == ("", True)
    assert [np.flatnonzero(row).tolist() for row in allowed_next([right, compiled.start()], 300)] == [[b], [a]]


@pytest.mark.parametrize("flexible", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_forced_tokens_are_what_masks_leave_one_by_one(tmp_path: Path, flexible: bool, seed: int) -> None:
    words = ["international", "internet", "interest", 'a "quote"', "naïve café"]
    item = {"type": "object", "properties": {"first name": {"enum": words}, "größe": {"type": "integer"}}}
    schema = item | {"required": ["first name", "größe"], "additionalProperties": False}
    schema |= {"x-guidance": {"whitespace_flexible": flexible, "whitespace_pattern": None}}
    made = make_tokenizer()
    made.save_pretrained(tmp_path)
    compiled = GrammarCompiler(tmp_path, len(made), [2]).compile("json_schema", json.dumps(schema))
    matcher, draw, written, num_forced = compiled.start(), random.Random(seed), list[int](), 0
    while not matcher.is_complete and len(written) < 200:
        forced = matcher.forced()
        assert compiled.start(written).forced() == forced
        num_forced += len(forced)
        for place, token in enumerate(forced):
            [allowed] = allowed_next([matcher], len(made))
            assert np.flatnonzero(allowed).tolist() == [token]
            assert matcher.forced() == forced[place:]
            matcher.consume([token])
        if not forced:
            [allowed] = allowed_next([matcher], len(made))
            forced = [draw.choice(np.flatnonzero(allowed).tolist())]
            matcher.consume(forced)
        written += forced
    assert not matcher.problem
    assert num_forced > 10


def test_a_model_without_an_end() -> None:
    with pytest.raises(GrammarError, match="end-of-sequence"):
        GrammarCompiler(Path("nowhere"), 300, []).compile("regex", "a")
    with pytest.raises(TokenizerError):
        GrammarCompiler(Path("nowhere"), 300, [2]).compile("regex", "a")


@pytest.mark.parametrize("pattern", ["(a{1,999}){1,999}b{99999}", "([ab]*a[ab]{900}){900}"])
def test_what_would_take_for_ever_ends(writer: BlindWriter, pattern: str) -> None:
    with pytest.raises(GrammarError):
        writer.write("regex", pattern, 0)


@pytest.fixture(scope="module", params=["text", "added", "special"])
def thinker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BlindWriter:
    """A tokenizer that has tokens for the tags of all formats, or spells them."""
    markers = {marker for name in reasoning_parser_names() for marker in find_reasoning_parser(name).markers}
    tags = () if request.param == "text" else sorted(markers)
    return BlindWriter(tmp_path_factory.mktemp("model"), tags, special=request.param == "special")


def answer_in(parser: ReasoningParser, output: str, prompt_end: str) -> str:
    chain = StageChain([parser(prompt_end)])
    parts = [*chain.push(output), *chain.flush()]
    return "".join(part.text for part in parts if isinstance(part, TextPart)).strip()


@pytest.mark.parametrize("prompt_end", ["", "<think>\n", "</think>\n\n"])
@pytest.mark.parametrize("name", reasoning_parser_names())
def test_the_answer_behind_a_thought_is_right(thinker: BlindWriter, name: str, prompt_end: str) -> None:
    parser = find_reasoning_parser(name)
    assert parser.frame is not None
    thought, preface, *_ = parser.frame(prompt_end)
    begun = ["" if thought is None else f"{thought[0]}Hm {{.{thought[1]}"]
    if thought is None or thought[0]:
        begun.append(preface)
    for seed, written in enumerate(begun):
        output = thinker.write("choice", CHOICES, seed, thought, preface, begun=thinker.token_ids(written))
        assert answer_in(parser, output, prompt_end) in ("yes", "no"), output
        assert not thinker.takes("choice", CHOICES, output.replace("yes", "no").replace("no", "na"), thought, preface)


@pytest.mark.parametrize("name", reasoning_parser_names())
def test_a_thought_ends_where_its_end_is_spelled(thinker: BlindWriter, name: str) -> None:
    parser = find_reasoning_parser(name)
    assert parser.frame is not None
    thought, preface, *_ = parser.frame("")
    assert thought is not None
    begun = thinker.token_ids(thought[0] + "Hm.") + thinker.token_ids(thought[1], spelled=True)
    output = thinker.write("choice", CHOICES, 0, thought, preface, begun=begun)
    assert answer_in(parser, output, "") in ("yes", "no")


@pytest.mark.parametrize("name", reasoning_parser_names())
def test_thoughts_are_free_and_answers_are_not(writer: BlindWriter, name: str) -> None:
    parser = find_reasoning_parser(name)
    assert parser.frame is not None
    thought, preface, _ = parser.frame("")
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


def chain_of_schemas(length: int) -> str:
    """Each is a property of the one before it."""
    schemas = {f"s{n}": {"properties": {"a": {"$ref": f"#/$defs/s{n + 1}"}}} for n in range(length)}
    return json.dumps({"$ref": "#/$defs/s0", "$defs": schemas | {f"s{length}": {"const": 1}}})


def chain_of_rules(length: int) -> str:
    return "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(length)) + f'r{length}: "1"'


@pytest.mark.parametrize(
    ("kind", "grammar"), [("json_schema", chain_of_schemas(1500)), ("grammar", chain_of_rules(8000))]
)
def test_what_refers_to_one_another_a_thousand_times_does_not_end_the_process(
    writer: BlindWriter, kind: str, grammar: str
) -> None:
    """llguidance needs more stack for it than threads have."""
    assert writer.takes(kind, grammar, "1" if kind == "grammar" else '{"a":{}}')


@pytest.mark.parametrize(
    ("kind", "grammar", "told"),
    [
        ("grammar", "\n" * 200_000, "neither Lark"),
        ("grammar", 'start: "' + '\\"' * 100_000, None),
        ("grammar", "start: /" + r"\/" * 100_000, None),
        ("grammar", "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(9000)), "so many rules"),
        ("grammar", 'start: "' + "a" * 600_000 + '"', "characters"),
        ("regex", "a?" * 40_000, "too big"),
        ("json_schema", '{"items": {"type": "array", "minItems": 1000000000}}', "more than 65536"),
        ("json_schema", '{"anyOf": [' + '{"maxItems": 9999},' * 99 + "{}]}", "more than 65536"),
        ("grammar", 'start: "a" %json {"type": "array", "maxItems": 1000000000}', "more than 65536"),
    ],
)
def test_what_would_take_minutes_or_gigabytes_is_refused(
    writer: BlindWriter, kind: str, grammar: str, told: str | None
) -> None:
    with pytest.raises(GrammarError, match=told):
        writer.takes(kind, grammar, "")


def test_what_outputs_have_taught_a_grammar_wears_it_out(writer: BlindWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lexer keeps the states of all outputs, so the last ones fail at their first token."""
    monkeypatch.setitem(compiler._LIMITS, "max_lexer_states", 100)
    regex = "[ab]*a[ab]{12}c"
    compiled = writer.compiled("regex", regex)

    def write_some() -> None:
        for seed in range(100):
            writer.write("regex", regex, seed)

    assert not compiled.is_worn_out
    for _ in range(2):
        with pytest.raises(GrammarError, match="too many states"):
            write_some()
        assert compiled.is_worn_out


@pytest.mark.parametrize(
    ("kind", "grammar"),
    [
        ("json_schema", '{"type": "integer", "multipleOf": 1000003}'),
        ("json_schema", '{"multipleOf": 1e300}'),
        ("json_schema", json.dumps({"allOf": [{"multipleOf": prime} for prime in (9.67, 97.1, 977)]})),
        ("json_schema", json.dumps({"allOf": [{"multipleOf": 10**9}, {"multipleOf": 7}]})),
        ("grammar", r'start: %json {"type": "integer", "multi\u0070leOf" : 1000003}'),
    ],
)
def test_remainders_are_counted_before_the_compiler_makes_them(writer: BlindWriter, kind: str, grammar: str) -> None:
    """It would take tens of seconds for some of these, and all memory for others."""
    with pytest.raises(GrammarError, match="'multipleOf' are too large"):
        writer.takes(kind, grammar, "0")


def test_usual_multiples(writer: BlindWriter) -> None:
    prices = {"price": {"multipleOf": 0.01}, "seconds": {"multipleOf": 3600}, "share": {"multipleOf": 0.25}}
    text = json.dumps({"properties": {**prices, "bytes": {"multipleOf": 1000}}, "additionalProperties": False})
    assert writer.takes("json_schema", text, '{"price":19.99,"seconds":7200,"share":0.75,"bytes":5000}')
    assert not writer.takes("json_schema", text, '{"seconds":7201}')
    assert writer.takes("json_schema", '{"multipleOf": 1000000}', "3000000")
