"""Checks of what the model writes: answers that end, calls of tools, JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engines.errors import PenstockError
from penstock.gateway.commands.offline.outputs import Answer
from penstock.gateway.commands.verify.prompts import CALLS, JSON_ANSWERS, QUESTIONS, question
from penstock.gateway.commands.verify.report import Notes, Result, Row
from penstock.gateway.commands.verify.subject import Subject
from penstock.gateway.commands.verify.text_checks import NO_TEMPLATE

_ANSWER_TOKENS, _THINKING_TOKENS, _CALL_TOKENS, _JSON_TOKENS = 256, 1024, 160, 200
SURE, GARBAGE = 0.6, 0.25
"""Geometric means of the probabilities of greedy answers. Below the first are models that hardly know what to write
(the demo model: 0.98; with two tensors exchanged: 0.17 to 0.8), below the second those that write noise."""


def check_answers(subject: Subject, *, quick: bool) -> Row:
    """Whether turns end, and whether the model is as sure of its answers as a trained one."""
    notes = Notes("answers")
    if subject.model.chat_template is None:
        notes.add("skipped", NO_TEMPLATE)
        return notes.row()
    limit = _ANSWER_TOKENS if subject.model.parsers.reasoning is None else _THINKING_TOKENS
    logprobs = {"logprobs": 0} if subject.info.supports_logprobs else {}
    questions = [(question(text), logprobs) for text in QUESTIONS[: 4 if quick else None]]
    answers = _without_errors(subject.ask(questions, limit), notes)
    if not answers:
        return notes.row()
    ended = sum(answer.outputs[0].finish_reason != "length" for answer in answers)
    result: Result = "pass" if 2 * ended >= len(answers) else "warn" if ended else "FAIL"
    notes.add(result, f"{ended} of {len(answers)} end before the limit of {limit} tokens")
    empty = sum(not (answer.text or answer.outputs[0].message.get("reasoning_content")) for answer in answers)
    if empty:
        notes.add("FAIL" if empty == len(answers) else "warn", f"empty: {empty}")
    repeating = sum(repeats(answer.outputs[0].token_ids) for answer in answers)
    if repeating:
        notes.add("warn" if 2 * repeating > len(answers) else "pass", f"repeating themselves to the end: {repeating}")
    sure = _judge_sureness(answers, notes)
    shown = [{"text": answer.text[:200], "finish_reason": answer.outputs[0].finish_reason} for answer in answers]
    return notes.row(answers=shown, ended=ended, empty=empty, repeating=repeating, sureness=sure)


def _without_errors(answers: Sequence[Answer | PenstockError], notes: Notes) -> list[Answer]:
    """Those that came; errors are noted."""
    failed = Counter(str(answer) for answer in answers if isinstance(answer, PenstockError))
    for message, count in failed.items():
        notes.add("FAIL", f"{count} of {len(answers)} requests failed: {message}")
    return [answer for answer in answers if isinstance(answer, Answer)]


def repeats(token_ids: Sequence[int]) -> bool:
    """Whether the last half is one piece over and over, at least four times."""
    half = len(token_ids) // 2
    end = token_ids[len(token_ids) - half :]
    return any(end[period:] == end[:-period] for period in range(1, half // 4 + 1))


def _judge_sureness(answers: Sequence[Answer], notes: Notes) -> float | None:
    """The geometric mean of the tokens' probabilities; None: the engine has no logprobs."""
    logprobs = [entry.logprob for answer in answers for entry in answer.outputs[0].logprobs or ()]
    if not logprobs:
        return None
    sure = math.exp(sum(logprobs) / len(logprobs))
    note = f"mean probability of their tokens {sure:.2f}"
    if sure >= SURE:
        notes.add("pass", note)
    else:
        why = "wrong weights, another model's template, or a weak model"
        notes.add("warn" if sure >= GARBAGE else "FAIL", f"{note}, which is little: {why}")
    return sure


def check_tools(subject: Subject, *, quick: bool) -> Row:
    """Calls that the model makes by itself, which may be few where it is weak; and calls that it has to make, of which
    all must be found in its answer, and valid."""
    notes, parser = Notes("tool calls"), subject.model.parsers.tools
    if subject.model.chat_template is None or parser is None:
        notes.add("skipped", NO_TEMPLATE if subject.model.chat_template is None else "no tool parser fits the model")
        return notes.row()
    cases = CALLS[: 10 if quick else None]
    answers = subject.ask([(question(text), {"tools": [tool]}) for tool, text, _ in cases], _CALL_TOKENS)
    _without_errors(answers, notes)
    counts: Counter[str] = Counter()
    for (tool, _, arguments), answer in zip(cases, answers, strict=True):
        if isinstance(answer, Answer):
            counts.update(_judge_call(answer, tool, arguments, parser.markers))
    figures: dict[str, Any] = {"prompts": len(cases), **counts}
    notes.add(
        "pass" if 2 * counts["valid"] >= len(cases) else "warn",
        f"{counts['valid']} of {len(cases)} prompts get a valid call, {counts['expected']} the expected one",
    )
    if counts["left"]:
        notes.add("warn", f"{counts['left']} have markup of calls in their text")
    figures |= _check_required(subject, cases[: 3 if quick else 5], notes)
    return notes.row(**figures)


def _check_required(subject: Subject, cases: Sequence[Any], notes: Notes) -> dict[str, Any]:
    if not subject.info.supports_grammars:
        notes.add("pass", "the engine has no grammars, so no call can be required")
        return {}
    questions = [(question(text), {"tools": [tool], "tool_choice": "required"}) for tool, text, _ in cases]
    answers = subject.ask(questions, _CALL_TOKENS)
    came = _without_errors(answers, notes)
    whole = [
        (answer, case)
        for answer, case in zip(answers, cases, strict=True)
        if isinstance(answer, Answer) and answer.outputs[0].finish_reason != "length"
    ]
    valid = sum("valid" in _judge_call(answer, case[0], case[2], ()) for answer, case in whole)
    if whole:
        notes.add("pass" if valid == len(whole) else "FAIL", f"{valid} of {len(whole)} required calls are valid")
    if len(whole) < len(came):
        notes.add("pass" if whole else "warn", f"{len(came) - len(whole)} required calls reached the limit")
    return {"required": len(whole), "required_valid": valid}


def _judge_call(
    answer: Answer, tool: Mapping[str, Any], arguments: Mapping[str, Any], markers: Sequence[str]
) -> set[str]:
    """Which of `valid`, `expected` and `left`: markup that the parser did not take."""
    marks = set()
    if answer.outputs[0].finish_reason != "length" and any(marker in answer.text for marker in markers):
        marks.add("left")
    function = tool["function"]
    for call in answer.outputs[0].message.get("tool_calls") or ():
        try:
            call_arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            continue
        if call["function"]["name"] == function["name"] and conforms(call_arguments, function["parameters"]):
            marks.add("valid")
            if call_arguments == arguments:
                marks.add("expected")
    return marks


def check_json(subject: Subject, *, quick: bool) -> Row:
    """JSON by a schema is kept by a grammar, so every answer that ends must be valid."""
    notes = Notes("JSON")
    if subject.model.chat_template is None or not subject.info.supports_grammars:
        reason = NO_TEMPLATE if subject.model.chat_template is None else "the engine has no grammars"
        notes.add("skipped", reason)
        return notes.row()
    cases = JSON_ANSWERS[: 10 if quick else None]
    questions = [(question(text), {"response_format": _response_format(schema)}) for schema, text in cases]
    answers = subject.ask(questions, _JSON_TOKENS)
    came = _without_errors(answers, notes)
    cut, wrong = 0, []
    for (schema, text), answer in zip(cases, answers, strict=True):
        if not isinstance(answer, Answer):
            continue
        if answer.outputs[0].finish_reason == "length":
            cut += 1
        elif not _is_json(answer.text, schema):
            wrong.append((text, answer.text))
    whole = len(came) - cut
    if wrong:
        notes.add("FAIL", f"{len(wrong)} of {whole} are not what was asked for: {wrong[0][1][:60]!r}")
    elif came:
        notes.add("pass", f"{whole} of {len(came)} end, and all of these are valid")
    if cut:
        notes.add("warn" if 2 * cut > len(came) else "pass", f"{cut} reached the limit of {_JSON_TOKENS} tokens")
    return notes.row(prompts=len(cases), ended=whole, valid=whole - len(wrong), cut=cut, wrong=dict(wrong))


def _response_format(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    if schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _is_json(text: str, schema: Mapping[str, Any] | None) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) if schema is None else conforms(value, schema)


def conforms(value: Any, schema: Mapping[str, Any]) -> bool:
    """Of the keywords that the built-in schemas have."""
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "object":
            return isinstance(value, dict) and _conforms_object(value, schema)
        case "array":
            fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return fits and all(conforms(part, schema["items"]) for part in value)
        case "string":
            return isinstance(value, str) and len(value) <= schema.get("maxLength", math.inf)
        case "boolean":
            return isinstance(value, bool)
        case kind:
            fits = isinstance(value, int if kind == "integer" else int | float) and not isinstance(value, bool)
            return fits and bool(schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf))


def _conforms_object(value: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    known, closed = schema["properties"], schema.get("additionalProperties") is False
    if any(name not in value for name in schema["required"]) or (closed and value.keys() - known.keys()):
        return False
    return all(conforms(part, known[name]) for name, part in value.items() if name in known)
