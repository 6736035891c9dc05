"""What every engine must do whose runner has grammars: an output is what was asked for, whatever else is computed."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from penstock.engines.contract.messages import FinishReason, Grammar, Thought, ThoughtBudget
from penstock.engines.scheduler.speculation import Speculation
from support.conformance import driver_of, prompt
from support.engine import Driver
from support.models import make_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["rose", "iris"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["kind", "count", "tags"],
    "additionalProperties": False,
    # A model that knows nothing would write white space until its tokens are used up.
    "x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None},
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
WORDS = Grammar("regex", "([a-f]{2} ){3}")
NEARLY_ANY = Grammar("regex", "[^e]{40}")
"""A mask that takes few tokens away."""
CHOICE = Grammar("choice", json.dumps(["yes", "no, thanks"]))
LETTERS = Grammar("grammar", 'root ::= "x" [a-c] [a-c] [a-c] "!"')
KINDS = {"json": JSON, "regex": WORDS, "nearly-any": NEARLY_ANY, "choice": CHOICE, "gbnf": LETTERS}
ASKED = {"max_tokens": 200, "ignore_eos": False}


@pytest.fixture(autouse=True)
def only_engines_with_grammars(candidate):
    candidate.needs("grammars")


def text_of(driver: Driver, request: int) -> str:
    text: str = make_tokenizer().decode(driver.tokens[request], skip_special_tokens=True)
    return text


@pytest.mark.parametrize("grammar", KINDS.values(), ids=list(KINDS))
def test_a_grammar_goes_on_behind_what_another_engine_has_put_out(candidate, grammar):
    candidate.needs("our scheduler")
    asked = {**ASKED, "temperature": 1.0, "seed": 3, "grammar": grammar}
    driver = driver_of(candidate)
    [whole] = driver.add(prompt(10), **asked)
    driver.run()
    for done in {1, len(driver.tokens[whole]) // 2}:
        [rest] = driver.add(prompt(10), behind=driver.tokens[whole][:done], **asked)
        driver.run()
        assert driver.tokens[rest] == driver.tokens[whole][done:]


def is_right(grammar: Grammar, text: str) -> bool:
    if grammar == CHOICE:
        return text in json.loads(grammar.text)
    if grammar in (WORDS, NEARLY_ANY):
        return re.fullmatch(grammar.text, text) is not None
    if grammar == LETTERS:
        return re.fullmatch("x[a-c]{3}!", text) is not None
    found = json.loads(text)
    return (
        list(found) == ["kind", "count", "tags"]
        and found["kind"] in ("rose", "iris")
        and 0 <= found["count"] <= 99
        and 1 <= len(found["tags"]) <= 2
    )


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 2.0, "min_p": 0.01}])
@pytest.mark.parametrize("grammar", KINDS.values(), ids=KINDS)
def test_an_output_is_what_was_asked_for(candidate, grammar, params):
    driver = driver_of(candidate)
    requests = driver.add(prompt(12), n=3, grammar=grammar, seed=5, **ASKED | params)
    driver.run()
    for request in requests:
        assert driver.ends[request].finish_reason is FinishReason.STOP
        assert is_right(grammar, text_of(driver, request))


def test_outputs_do_not_depend_on_their_neighbours(candidate):
    driver = driver_of(candidate)
    alone = {}
    for grammar in (JSON, WORDS, CHOICE):
        [request] = driver.add(prompt(40), grammar=grammar, **ASKED)
        driver.run()
        alone[grammar] = driver.tokens[request]
    mixed = driver_of(candidate, max_num_batched_tokens=48)
    free = {mixed.add(prompt(30 + n, n), 24)[0]: n for n in range(3)}
    bound = {mixed.add(prompt(40), grammar=grammar, **ASKED)[0]: grammar for grammar in alone}
    mixed.run()
    for request, n in free.items():
        assert mixed.tokens[request] == candidate.expect(prompt(30 + n, n), 24)
    for request, grammar in bound.items():
        assert mixed.tokens[request] == alone[grammar]


def test_preemption_and_resumption(candidate):
    driver = driver_of(candidate)
    [alone] = driver.add(prompt(40), grammar=Grammar("regex", "[a-z]{80}"), **ASKED)
    driver.run()
    crowded = driver_of(candidate)
    requests = [crowded.add(prompt(40), grammar=Grammar("regex", "[a-z]{80}"), **ASKED)[0] for _ in range(8)]
    crowded.run()
    assert crowded.stats.preemptions > 0
    for request in requests:
        assert crowded.tokens[request] == driver.tokens[alone]


def test_guesses_change_nothing(candidate):
    candidate.needs("drafts")
    tokens = []
    for speculative in ("off", "ngram"):
        driver = driver_of(candidate, speculative=speculative)
        [request] = driver.add(prompt(10) * 3, grammar=Grammar("regex", "(ab|cd){40}"), **ASKED)
        driver.run()
        tokens.append(driver.tokens[request])
    assert tokens[0] == tokens[1]
    assert driver.stats.accepted_tokens > 0


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 1.0, "top_p": 0.9}, {"frequency_penalty": 1.0}, {"logprobs": 1}, {"max_tokens": 17}],
    ids=["greedy", "sampled", "penalized", "logprobs", "cut off"],
)
def test_forced_tokens_that_go_together_change_nothing(candidate, params, monkeypatch):
    candidate.needs("our scheduler", *(["logprobs"] if "logprobs" in params else []))
    monkeypatch.setattr(Speculation, "_jump_pays", lambda *_: True)
    found = []
    for jump_ahead in (False, True):
        driver = driver_of(candidate, jump_ahead=jump_ahead)
        logprobs: dict[int, list[int]] = {}
        for length in (10, 40, 70):
            driver.add(prompt(length), n=2, grammar=JSON, seed=3, **ASKED | params)
        driver.add(prompt(30), 40)
        while len(driver.ends) < 7:
            for output in driver.step():
                logprobs.setdefault(output.id, []).extend(one.token_id for one in output.logprobs or [])
        found.append((driver.tokens, {key: end.finish_reason for key, end in driver.ends.items()}, logprobs))
        jumps = candidate.abilities["forced tokens"] and jump_ahead and "logprobs" not in params
        assert (driver.stats.forced_tokens > 0) == jumps
    assert found[0] == found[1]


def test_an_answer_behind_a_thought(candidate):
    candidate.needs("our scheduler")
    thinking = Grammar("choice", CHOICE.text, thought=Thought("", "."))
    driver = driver_of(candidate)
    # without a bias towards the end of the thought, a model of random weights would think on
    [request] = driver.add(prompt(20), grammar=thinking, logit_bias={make_tokenizer().encode(".")[0]: 100.0}, **ASKED)
    driver.run()
    assert text_of(driver, request).lstrip(".").strip() in json.loads(CHOICE.text)
    assert driver.ends[request].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("behind", [Grammar("text", ""), CHOICE], ids=["text", "choice"])
def test_a_thought_that_is_too_long_is_ended(candidate, behind):
    candidate.needs("our scheduler")
    budget = ThoughtBudget(12, ("<think>",), ("</think>",), "</think>", inside=True, again=False)
    bound = Grammar(behind.kind, behind.text, Thought("", "</think>") if behind == CHOICE else None, "", budget)
    driver = driver_of(candidate)
    requests = driver.add(prompt(20), n=3, grammar=bound, seed=3, temperature=1.0, **ASKED | {"max_tokens": 60})
    [free] = driver.add(prompt(10), 8)
    driver.run()
    closing = make_tokenizer().encode("</think>")
    for request in requests:
        tokens = driver.tokens[request]
        at = next(at for at in range(12, 16) if tokens[at : at + len(closing)] == closing)
        if behind == CHOICE:
            answer = make_tokenizer().decode(tokens[at + len(closing) :], skip_special_tokens=True)
            assert answer.strip() in json.loads(CHOICE.text)
        else:
            assert tokens.count(closing[0]) < len(tokens)
            assert len(tokens) > at + len(closing)
    assert driver.tokens[free] == candidate.expect(prompt(10), 8)


def test_guesses_do_not_pass_the_end_of_a_thought(candidate):
    candidate.needs("drafts")
    budget = ThoughtBudget(30, ("<think>",), ("</think>",), "</think>", inside=True, again=False)
    tokens = []
    for settings in ({}, {"speculative": "ngram"}):
        driver = driver_of(candidate, **settings)
        [request] = driver.add(prompt(10) * 3, 60, grammar=Grammar("text", "", budget=budget))
        driver.run()
        tokens.append(driver.tokens[request])
    assert tokens[0] == tokens[1]
    assert make_tokenizer().decode(tokens[0]).count("</think>") == 1


def test_what_does_not_compile_ends_alone(candidate):
    driver = driver_of(candidate)
    [wrong] = driver.add(prompt(10), grammar=Grammar("json_schema", '{"not": {}}'), **ASKED)
    [right] = driver.add(prompt(10), 8)
    driver.run()
    assert driver.ends[wrong].error.code == "invalid_request"
    assert '"not"' in driver.ends[wrong].error.message
    assert driver.tokens[right] == candidate.expect(prompt(10), 8)


def test_logprobs_of_what_was_sampled(candidate):
    driver = driver_of(candidate)
    [request] = driver.add(prompt(10), grammar=CHOICE, logprobs=1, **ASKED)
    seen = []
    while not driver.ends:
        driver.run(until=lambda: True)
        for output in driver.step():
            seen += [entry.token_id for entry in output.logprobs or ()]
    assert seen == driver.tokens[request]
