"""Conversations with tools, and answers in JSON: the part of the recipe in which values are copied, not known.

`ToolRecipe(rng, library)` makes conversations about tools that it invents, with values drawn at random, many of them
made up, so that the model learns to copy what it has never seen. `JsonRecipe` does the same for answers in JSON.
Nothing here is a fact about the world.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, Any]
WORDS = tomllib.loads((Path(__file__).parent / "tools.toml").read_text(encoding="utf-8"))
LISTS = {key: value.split() for key, value in WORDS["words"].items()}
CHAT_TEMPLATE = (
    "{%- set said = '' if not messages or messages[0]['role'] != 'system' else messages[0]['content'] %}"
    "{%- if tools %}"
    "{{- '<|im_start|>system\\n' + (said + '\\n\\n' if said else '') + 'Tools:\\n' }}"
    "{%- for tool in tools %}"
    "{%- set function = tool['function'] %}"
    "{%- set schema = function['parameters'] or {} %}"
    "{{- '- ' + function['name'] + '(' }}"
    "{%- for name, kind in (schema['properties'] or {}).items() %}"
    "{{- (', ' if not loop.first else '') + name + ('' if name in (schema['required'] or []) else '?') + ': ' }}"
    "{{- kind['enum'] | join('|') if kind['enum'] else kind['type'] if kind['type'] is string else 'any' }}"
    "{%- endfor %}"
    "{{- ')' + (' ' + function['description'] if function['description'] else '') + '\\n' }}"
    "{%- endfor %}"
    "{{- 'Call them with <tool_call>.<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if not (tools and loop.first and said) %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{%- for call in message['tool_calls'] or [] %}"
    "{%- set given = call['function']['arguments'] %}"
    "{{- ('\\n' if message['content'] or not loop.first else '') + '<tool_call>\\n{\"name\": \"' }}"
    "{{- call['function']['name'] + '\", \"arguments\": ' }}"
    "{{- (given if given is string else given | tojson) + '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def call_text(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


@dataclass
class Case:
    """A question, and what should follow."""

    question: str
    calls: list[tuple[str, dict[str, Any]]]
    results: list[str]
    answer: str
    """Behind the results."""


Offer = tuple[dict[str, Any], Callable[[], Case]]
"""A tool, and questions that need it."""


def signature(tool: dict[str, Any]) -> str:
    """As the chat template shows a tool."""
    function = tool["function"]
    schema = function["parameters"]
    shown = [
        f"{name}{'' if name in schema['required'] else '?'}: {'|'.join(kind.get('enum', [kind['type']]))}"
        for name, kind in schema["properties"].items()
    ]
    about = f" {function['description']}" if function["description"] else ""
    return f"- {function['name']}({', '.join(shown)}){about}\n"


def system_text(said: str, tools: list[dict[str, Any]]) -> str:
    """What the chat template writes as the system's message."""
    if not tools:
        return said
    return (f"{said}\n\n" if said else "") + f"Tools:\n{''.join(map(signature, tools))}Call them with <tool_call>."


def listed(texts: list[str]) -> str:
    return ", ".join(texts[:-1]) + (" and " if texts[1:] else "") + texts[-1]


class Values:
    """Values to copy."""

    def __init__(self, rng: random.Random, names: list[str]) -> None:
        """`names`: of Python's library."""
        self.rng = rng
        self.names = names

    def of(self, kind: str) -> Any:
        return getattr(self, kind)()

    def word(self) -> str:
        rng = self.rng
        if rng.random() < 0.45:
            return "".join(rng.choices(LISTS["syllables"], k=rng.choice([1, 2, 2, 3])))
        return rng.choice(LISTS[rng.choice(["thing", "noun", "food", "colour"])])

    def city(self) -> str:
        rng = self.rng
        if rng.random() < 0.4:
            return "".join(rng.choices(LISTS["syllables"], k=rng.choice([2, 2, 3]))).capitalize()
        return rng.choice(LISTS["city"]).replace("_", " ")

    def person(self) -> str:
        rng = self.rng
        first = self.city() if rng.random() < 0.25 else rng.choice(LISTS["person"])
        return f"{first} {self.city()}" if rng.random() < 0.2 else first

    def phrase(self) -> str:
        rng = self.rng
        words = [self.word() for _ in range(rng.choice([1, 1, 2, 2, 3]))]
        if rng.random() < 0.3:
            words[-1:] = [words[-1], rng.choice(["in", "for", "from", "near", "and"]), self.city()]
        return " ".join(words)

    def integer(self) -> int:
        rng = self.rng
        return rng.randrange(10 ** rng.choice([1, 1, 2, 2, 3, 3, 4, 5]))

    def number(self) -> float:
        rng = self.rng
        return (
            self.integer() if rng.random() < 0.6 else round(rng.random() * 10 ** rng.randrange(4), rng.choice([1, 2]))
        )

    def amount(self) -> int:
        return self.rng.randrange(1, 100)

    def boolean(self) -> bool:
        return self.rng.random() < 0.5

    def time(self) -> str:
        rng = self.rng
        return f"{rng.randrange(24):02d}:{rng.choice([0, 0, 15, 30, 30, 45, rng.randrange(60)]):02d}"

    def date(self) -> str:
        rng = self.rng
        if rng.random() < 0.5:
            return f"{rng.randrange(1990, 2040)}-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}"
        return rng.choice(LISTS["day"])

    def file(self) -> str:
        rng = self.rng
        path = f"{self.word()}.{rng.choice(LISTS['suffix'])}"
        return f"{self.word()}/{path}" if rng.random() < 0.3 else path

    def email(self) -> str:
        return f"{self.word()}@{self.word()}.{self.rng.choice(['com', 'org', 'net', 'io'])}"

    def currency(self) -> str:
        return self.rng.choice(LISTS["currency"])

    def language(self) -> str:
        return self.rng.choice(LISTS["language"])

    def sum(self) -> str:
        rng = self.rng
        terms = [str(self.integer()) for _ in range(rng.choice([2, 2, 2, 3]))]
        return "".join(
            part
            for i, term in enumerate(terms)
            for part in ([rng.choice([" + ", " - ", " * ", " / "])] if i else []) + [term]
        )

    def python(self) -> str:
        return self.rng.choice(self.names)


JSON_TYPES = {"integer": "integer", "amount": "integer", "number": "number", "boolean": "boolean"}


class ToolRecipe:
    def __init__(self, rng: random.Random, values: Values) -> None:
        self.rng = rng
        self.values = values

    # ---- tools -----------------------------------------------------------------------------------------

    def described(self, name: str, description: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
        roll = self.rng.random()
        if roll > 0.8:  # in other forms: camelCase, or with a minus
            first, *rest = name.split("_")
            name = first + "".join(part.capitalize() for part in rest) if roll < 0.92 else name.replace("_", "-")
        parameters = {"type": "object", "properties": properties, "required": required}
        return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}

    def known(self) -> Offer:
        """A tool of `tools.toml`, whose name, description and parameters vary."""
        rng = self.rng
        family = rng.choice(WORDS["tool"])
        kinds: dict[str, str] = family["kinds"]
        keys = {slot: rng.choice(names.split("|")) for slot, names in family["keys"].items()}
        if len({*keys.values()}) < len(keys):
            return self.known()
        properties: dict[str, Any] = {}
        for slot, kind in kinds.items():
            choices = {"enum": kind.split("|")} if "|" in kind else {}
            properties[keys[slot]] = {"type": JSON_TYPES.get(kind, "string")} | choices
        optional = family.get("optional", [])
        required = [keys[slot] for slot in kinds if slot not in optional]
        tool = self.described(rng.choice(family["names"]), rng.choice(family["descriptions"]), properties, required)

        def drawn(slot: str) -> Any:
            return rng.choice(kinds[slot].split("|")) if "|" in kinds[slot] else self.values.of(kinds[slot])

        def case() -> Case:
            asked = rng.choice(family["questions"])
            slots = [slot for slot in kinds if f"{{{slot}}}" in asked]
            each = [{slot: drawn(slot) for slot in kinds}]
            several = [slot for slot in slots if kinds[slot] in ("city", "person", "python")]
            shown = each[0]
            if len(several) == 1 and rng.random() < 0.25:
                [slot] = several
                each += [each[0] | {slot: drawn(slot)} for _ in range(rng.choice([1, 1, 1, 2]))]
                each = [*{values[slot]: values for values in each}.values()]
                shown = each[0] | {slot: listed([values[slot] for values in each])}
            outcomes = [self.outcome(values, family) for values in each]
            calls = [(tool["function"]["name"], {keys[slot]: values[slot] for slot in slots}) for values in each]
            answer = " ".join(answer for _, answer in outcomes)
            return Case(asked.format(**shown), calls, [result for result, _ in outcomes], answer)

        return tool, case

    def made_up(self) -> Offer:
        """A tool of random words, with questions in the same words."""
        rng = self.rng
        verb, noun = rng.choice(LISTS["verb"]), rng.choice(LISTS["noun"])
        keys = rng.sample(LISTS["key"], k=rng.choice([0, 1, 1, 2, 2, 3]))
        kinds = {key: rng.choice(MADE_UP_KINDS) for key in keys}
        choices = {key: rng.sample(LISTS["colour"] + LISTS["food"], k=rng.choice([2, 3])) for key in keys}
        properties: dict[str, Any] = {}
        for key, kind in kinds.items():
            enum = {"enum": choices[key]} if kind == "enum" else {}
            properties[key] = {"type": JSON_TYPES.get(kind, "string")} | enum
        forms = [f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}_the_{noun}", f"{noun}_{verb}"]
        about = [f"{verb.capitalize()} a {noun}.", f"{verb.capitalize()} the {noun}.", "", f"Can {verb} a {noun}"]
        optional = rng.sample(keys, k=1) if len(keys) > 1 and rng.random() < 0.3 else []
        required = [key for key in keys if key not in optional]
        tool = self.described(rng.choice(forms), rng.choice(about), properties, required)

        def case() -> Case:
            given: dict[str, Any] = {}
            for key, kind in kinds.items():
                if key in required or rng.random() < 0.5:
                    given[key] = rng.choice(choices[key]) if kind == "enum" else self.values.of(kind)
            shown = [
                f"{key.replace('_', ' ')} {json.dumps(v) if isinstance(v, bool) else v}" for key, v in given.items()
            ]
            joined = rng.choice([" with ", " with the ", ": ", ", "]) + listed(shown) if shown else ""
            asked = f"{verb} {rng.choice(['the', 'the', 'a', 'my'])} {noun}{joined}"
            question = rng.choice(
                ["Please {}.", "{}.", "{}", "Could you {}?", "I want to {}.", "Can you {}?", "Use the tool to {}."]
            )
            question = question.format(asked)
            result, answer = self.outcome(given)
            return Case(question[0].upper() + question[1:], [(tool["function"]["name"], given)], [result], answer)

        return tool, case

    def outcome(self, values: dict[str, Any], family: dict[str, Any] | None = None) -> tuple[str, str]:
        """What the tool gives back, and what to say then."""
        rng = self.rng
        if family is not None and "results" in family and rng.random() < 0.7:
            found = {
                key: rng.choice(kind.split("|")) if "|" in kind else self.values.of(kind)
                for key, kind in family["results"].items()
            }
            plain = len(found) == 1 and rng.random() < 0.6
            result = str(next(iter(found.values()))) if plain else json.dumps(found, ensure_ascii=False)
            return result, rng.choice(family["answers"]).format(**values, **found)
        roll = rng.random()
        if roll < 0.3:
            form = rng.choice(
                ["The {a} of the {b} is {c}.", "{c} {a} for {b}.", "Found the {a}: {c}.", "{a} {b}, {c}.", "{c}"]
            )
            text = form.format(a=self.values.word(), b=self.values.word(), c=self.values.phrase())
            return text, f"The answer is: {text}"
        if roll < 0.4:
            return rng.choice(["ok", "done", "true", "success", "OK", '{"ok": true}', '{"status": "ok"}']), "Done."
        if roll < 0.5:
            problem = f"{rng.choice(['unknown', 'no such', 'cannot find', 'not allowed:'])} {self.values.word()}"
            return rng.choice([json.dumps({"error": problem}), f"error: {problem}"]), f"That did not work: {problem}."
        kinds = ["number", "integer", "word", "city", "time", "date", "person"]
        if roll < 0.7:
            value = self.values.of(rng.choice(kinds))
            return str(value), f"The answer is {value}."
        found = {key: self.values.of(rng.choice(kinds)) for key in rng.sample(LISTS["key"], k=rng.choice([1, 2, 2, 3]))}
        text = listed([f"the {key.replace('_', ' ')} is {value}" for key, value in found.items()])
        return json.dumps(found, ensure_ascii=False), f"{text[0].upper()}{text[1:]}."

    # ---- conversations ---------------------------------------------------------------------------------

    def offers(self, least: int = 1) -> list[Offer]:
        """Of up to four tools."""
        count = max(least, self.rng.choice([1, 1, 2, 2, 3, 3, 4]))
        found: dict[str, Offer] = {}
        while len(found) < count:
            tool, case = self.made_up() if self.rng.random() < 0.4 else self.known()
            found.setdefault(tool["function"]["name"], (tool, case))
        return list(found.values())

    def case(self, offers: list[Offer]) -> Case:
        """A question for one of these, or two questions at once."""
        rng = self.rng
        case = rng.choice(offers)[1]()
        if rng.random() < 0.15:
            other = rng.choice(offers)[1]()
            ask = other.question[0].lower() + other.question[1:]
            case.question = f"{case.question.rstrip('?. ')}{rng.choice(['? And ', '. And ', ', and ', '. Then '])}{ask}"
            case.calls += [call for call in other.calls if call not in case.calls]
            case.results = (case.results + other.results)[: len(case.calls)]
            case.answer = f"{case.answer} {other.answer}"
        return case


MADE_UP_KINDS = ["word", "word", "city", "person", "integer", "amount", "number", "boolean", "enum", "date"]


class JsonRecipe:
    """Answers in JSON, about the library and about what the question says."""

    def __init__(self, rng: random.Random, values: Values, facts: Callable[[], dict[str, Any]]) -> None:
        """`facts` draws what is known of a name: its keys in any order."""
        self.rng = rng
        self.values = values
        self.facts = facts

    def turn(self) -> tuple[str, str, str]:
        """A system prompt or "", a question, the answer."""
        return self.extraction() if self.rng.random() < 0.6 else self.fact()

    def fact(self) -> tuple[str, str, str]:
        rng, known = self.rng, self.facts()
        keys = rng.sample(list(known), k=rng.choice([1, 2, 2, 3, 3, len(known)]))
        named = listed(keys)
        answer = json.dumps({key: known[key] for key in keys}, ensure_ascii=False)
        name = known["name"]
        if rng.random() < 0.4:
            system = rng.choice(WORDS["json"]["system_keys"]).format(keys=named)
            return system, rng.choice(WORDS["json"]["plain"]).format(x=name), answer
        if rng.random() < 0.6:
            return "", rng.choice(WORDS["json"]["with_keys"]).format(x=name, keys=named), answer
        usual = {key: known[key] for key in ("name", "module", "summary")}
        if rng.random() < 0.5:
            system = rng.choice(WORDS["json"]["system"])
            return system, rng.choice(WORDS["json"]["plain"]).format(x=name), json.dumps(usual, ensure_ascii=False)
        return "", rng.choice(WORDS["json"]["no_keys"]).format(x=name), json.dumps(usual, ensure_ascii=False)

    def extraction(self) -> tuple[str, str, str]:
        """What a sentence says, as JSON."""
        rng = self.rng
        form = rng.choice(WORDS["extract"])
        values = {slot: self.value(kind) for slot, kind in form["kinds"].items()}
        shown = {slot: " and ".join(value) if isinstance(value, list) else value for slot, value in values.items()}
        text = rng.choice(form["texts"]).format(**shown)
        keys = list(values)
        if rng.random() < 0.4:
            keys = rng.sample(keys, k=rng.randrange(1, len(keys) + 1))
        names = {key: rng.choice(form["names"].get(key, key).split("|")) for key in keys}
        answer = json.dumps({names[key]: values[key] for key in keys}, ensure_ascii=False)
        named = rng.choice([", ".join, listed])([*names.values()])
        roll = rng.random()
        if roll < 0.35:
            return rng.choice(WORDS["json"]["system_extract"]).format(keys=named), text, answer
        if roll < 0.8:
            return "", rng.choice(WORDS["json"]["extract"]).format(keys=named, text=text), answer
        usual = json.dumps(values, ensure_ascii=False)
        return rng.choice(WORDS["json"]["system_usual"]).format(what=form["what"]), text, usual

    def value(self, kind: str) -> Any:
        if kind == "people":
            return [self.values.person() for _ in range(self.rng.choice([1, 2, 2]))]
        return self.rng.choice(kind.split("|")) if "|" in kind else self.values.of(kind)
