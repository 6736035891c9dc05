"""Structure that a caller's fields ask for: OpenAI's `response_format`, and vLLM's names."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.engines.contract.messages import Grammar
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.requests.bounded_json import decode_json
from penstock.tokenizers import lark

MAX_GRAMMAR_CHARS = 1 << 18
MAX_CHOICES = 1024
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_COMPACT = {"x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}}

Schema = dict[str, Any] | bool


class JsonSchema(msgspec.Struct, kw_only=True):
    """OpenAI's; the schema holds whether `strict` is set or not."""

    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None


class TaggedPart(msgspec.Struct):
    """A part of a text: JSON between `begin` and `end`."""

    begin: str
    schema: Schema
    end: str


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str
    json_schema: JsonSchema | None = None
    schema: Schema | None = None
    """llama.cpp's: of a `json_object`, or instead of `json_schema`."""
    structures: list[TaggedPart] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's; one of them, and what JSON looks like."""

    json: str | Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    """A ResponseFormat of this type, as JSON."""
    disable_any_whitespace: bool | None = None


class StructureFields(msgspec.Struct, kw_only=True):
    """What a caller may say about the form of an output. None: silent."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def wanted_grammar(fields: StructureFields) -> tuple[Grammar, str] | None:
    """What the output has to be, and the field that says so. Raises InvalidRequestError, also for two that do, and
    UnsupportedError."""
    grammars: list[tuple[Grammar, str]] = []
    if fields.response_format is not None:
        grammar = _of_format(fields.response_format, "response_format")
        grammars += [(grammar, "response_format")] if grammar else []
    grammars += [(grammar, "structured_outputs") for grammar in _of_outputs(fields.structured_outputs)]
    legacy = {
        "guided_json": fields.guided_json is not None and json_schema(fields.guided_json, "guided_json"),
        "guided_regex": fields.guided_regex is not None and _text("regex", fields.guided_regex, "guided_regex"),
        "guided_choice": fields.guided_choice is not None and _choice(fields.guided_choice, "guided_choice"),
        "guided_grammar": fields.guided_grammar is not None
        and _text("grammar", fields.guided_grammar, "guided_grammar"),
    }
    grammars += [(grammar, name) for name, grammar in legacy.items() if grammar]
    if len(grammars) > 1:
        message = f"Only one of {', '.join(dict.fromkeys(name for _, name in grammars))} can be given."
        if len({name for _, name in grammars}) == 1:
            message = f"{grammars[0][1]}: only one kind of structure can be given."
        raise InvalidRequestError(message, param=grammars[1][1])
    return grammars[0] if grammars else None


def grammar_field(fields: StructureFields) -> str | None:
    """The one of these fields that says what the output has to be, if one does."""
    if fields.response_format is not None and fields.response_format.type != "text":
        return "response_format"
    names = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
    return next((name for name in names if getattr(fields, name) is not None), None)


def _of_format(response_format: ResponseFormat, where: str) -> Grammar | None:
    if response_format.type == "text":
        return None
    if (
        response_format.type in ("json_object", "json_schema")
        and response_format.json_schema is None
        and response_format.schema is not None
    ):
        return json_schema(response_format.schema, f"{where}.schema")
    if response_format.type == "json_object":
        return json_schema(_ANY_OBJECT, where)
    if response_format.type == "json_schema":
        if response_format.json_schema is None:
            raise InvalidRequestError(f"{where}.json_schema is missing.", param=f"{where}.json_schema")
        schema = response_format.json_schema.schema
        return json_schema(_ANY_OBJECT if schema is None else schema, f"{where}.json_schema.schema")
    if response_format.type == "structural_tag":
        if not response_format.structures or not response_format.triggers:
            message = f"{where} of type structural_tag needs structures and triggers."
            raise UnsupportedError(message, param=where)
        return _tagged(response_format.structures, response_format.triggers, where)
    message = f"{where}.type must be text, json_object, json_schema or structural_tag."
    raise InvalidRequestError(message, param=f"{where}.type")


def _of_outputs(outputs: StructuredOutputs | None) -> list[Grammar]:
    if outputs is None:
        return []
    where, compact = "structured_outputs", bool(outputs.disable_any_whitespace)
    grammars = []
    if outputs.json is not None:
        grammars.append(json_schema(outputs.json, f"{where}.json", compact=compact))
    if outputs.json_object:
        grammars.append(json_schema(_ANY_OBJECT, f"{where}.json_object", compact=compact))
    if outputs.regex is not None:
        grammars.append(_text("regex", outputs.regex, f"{where}.regex"))
    if outputs.choice is not None:
        grammars.append(_choice(outputs.choice, f"{where}.choice"))
    if outputs.grammar is not None:
        grammars.append(_text("grammar", outputs.grammar, f"{where}.grammar"))
    if outputs.structural_tag is not None:
        tag = _decoded(outputs.structural_tag, ResponseFormat, f"{where}.structural_tag")
        grammar = _of_format(tag, f"{where}.structural_tag")
        grammars += [grammar] if grammar else []
    if not grammars:
        message = f"{where} needs one of json, json_object, regex, choice, grammar and structural_tag."
        raise InvalidRequestError(message, param=where)
    return grammars


def json_schema(schema: str | Schema, where: str, *, compact: bool = False) -> Grammar:
    """For values that fit a schema, or its text. `where`: the caller's field. Raises InvalidRequestError."""
    if isinstance(schema, str):
        schema = _decoded(schema, Schema, where)
    if schema is False:
        raise InvalidRequestError(f"{where} allows no value.", param=where)
    fields: dict[str, Any] = dict(schema) if isinstance(schema, dict) else {}
    if compact:
        fields |= _COMPACT
    return _text("json_schema", msgspec.json.encode(fields).decode(), where)


def _decoded(text: str, kind: Any, where: str) -> Any:
    """JSON in a text: what was checked of the body has not looked into it. Raises InvalidRequestError."""
    return decode_json(text.encode(), kind, field=where)


def _choice(choices: list[str], where: str) -> Grammar:
    if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
        message = f"{where} must have 1 to {MAX_CHOICES} texts, none of them empty."
        raise InvalidRequestError(message, param=where)
    return _text("choice", msgspec.json.encode(choices).decode(), where)


def _tagged(parts: list[TaggedPart], triggers: list[str], where: str) -> Grammar:
    """Any text, in which what a trigger begins is one of the parts."""
    rules = [f"start: ({' | '.join(f'part_{number}' for number in range(len(parts)))})* TEXT", r"TEXT: /(.|\n)*/"]
    if len(parts) > MAX_CHOICES or len(triggers) > MAX_CHOICES or not all(triggers):
        message = f"{where} must have at most {MAX_CHOICES} structures and triggers, no trigger empty."
        raise InvalidRequestError(message, param=where)
    for number, part in enumerate(parts):
        trigger = next((trigger for trigger in triggers if part.begin.startswith(trigger)), None)
        if trigger is None:
            message = f"{where}.structures[{number}].begin starts with none of the triggers."
            raise InvalidRequestError(message, param=f"{where}.structures[{number}].begin")
        schema = {} if part.schema is True else part.schema
        if schema is False:
            at = f"{where}.structures[{number}].schema"
            raise InvalidRequestError(f"{at} allows no value.", param=at)
        begin, end = lark.literal(part.begin[len(trigger) :], {}), lark.literal(part.end, {})
        rules.append(f"part_{number}: trigger_{triggers.index(trigger)} {begin} {lark.json_value(schema)} {end}")
    rules += [f"trigger_{i}[lazy]: {lark.regex(lark.up_to(trigger))}" for i, trigger in enumerate(triggers)]
    return _text("grammar", "\n".join(rules), where)


def _text(kind: Any, text: str, where: str) -> Grammar:
    if not 1 <= len(text) <= MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(f"{where} must have 1 to {MAX_GRAMMAR_CHARS} characters.", param=where)
    return Grammar(kind, text)
