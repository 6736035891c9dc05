"""Schemas with whole numbers that llguidance would round, or take for 64 bits wide: bounds, constants and choices above
2**53. It computes in f64.

Such a number becomes a regular expression. llguidance has no place for one inside of a schema, so whatever the number
lies in (objects, arrays, alternatives, references) becomes rules of a grammar, and all else in there stays a schema.
What cannot be written so keeps the nearest bound that f64 has and that allows nothing more.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ... import lark
from .evaluated import Effort, Evaluated
from .negation import ANNOTATIONS
from .rewriting import has_others_inside

_ANY = "(?:0|[1-9][0-9]*)"
_FRACTION = r"(?:\.[0-9]+)?"
_NO_FRACTION = r"(?:\.0+)?"


class Bound(NamedTuple):
    value: int
    excluded: bool = False


def integers_between(low: int | None, high: int | None) -> str | None:
    """Both included; None has no bound. None: there are no such integers."""
    parts = []
    if low is None or low < 0:
        digits = _digits(1 if high is None else max(1, -high), None if low is None else -low)
        parts += [] if digits is None else [f"-{digits}"]
    if high is None or high >= 0:
        digits = _digits(0 if low is None else max(0, low), high)
        parts += [] if digits is None else [digits]
    return _either(parts) if parts else None


def numbers_between(low: Bound | None, high: Bound | None) -> str | None:
    """With fractions, and without exponents. None has no bound. None: there are no such numbers."""
    parts = []
    if low is None or low.value < 0:
        least = Bound(0, excluded=True) if high is None or high.value >= 0 else Bound(-high.value, high.excluded)
        part = _magnitudes(least, None if low is None else Bound(-low.value, low.excluded))
        parts += [] if part is None else [f"-{part}"]
    if high is None or high.value >= 0:
        part = _magnitudes(Bound(0) if low is None or low.value < 0 else low, high)
        parts += [] if part is None else [part]
    return _either(parts) if parts else None


def _magnitudes(low: Bound, high: Bound | None) -> str | None:
    """Of numbers that are not negative."""
    parts = []
    whole = _digits(low.value + low.excluded, None if high is None else high.value - 1)
    if whole is not None:
        parts.append(whole + _FRACTION)
    if low.excluded and (high is None or low.value < high.value):
        parts.append(rf"{low.value}\.[0-9]*[1-9][0-9]*")
    if high is not None and not high.excluded and (low.value < high.value or low == high):
        parts.append(f"{high.value}{_NO_FRACTION}")
    return _either(parts) if parts else None


def _digits(low: int, high: int | None) -> str | None:
    """Of no less than `low`, which is not negative, without zeros in front."""
    if high is None:
        return (
            _ANY
            if low == 0
            else _either([_of_length(str(low), "9" * len(str(low))), f"[1-9][0-9]{{{len(str(low))},}}"])
        )
    if low > high:
        return None
    short, long = len(str(low)), len(str(high))
    if short == long:
        return _of_length(str(low), str(high))
    between = [f"[1-9][0-9]{{{short},{long - 2}}}"] if long - short > 1 else []
    return _either([_of_length(str(low), "9" * short), *between, _of_length("1" + "0" * (long - 1), str(high))])


def _of_length(low: str, high: str) -> str:
    """Of as many digits as both have."""
    if not low:
        return ""
    rest = len(low) - 1
    if set(low) == {"0"} and set(high) == {"9"}:
        return _any_digits(len(low))
    if low[0] == high[0]:
        return low[0] + _of_length(low[1:], high[1:])
    parts, first, last = [], int(low[0]), int(high[0])
    if low[1:] != "0" * rest:
        parts.append(low[0] + _of_length(low[1:], "9" * rest))
        first += 1
    if high[1:] != "9" * rest:
        parts.append(high[0] + _of_length("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        digit = str(first) if first == last else f"[{first}-{last}]"
        parts.append(digit + _any_digits(rest))
    return _either(parts)


def _any_digits(count: int) -> str:
    return "" if count == 0 else "[0-9]" if count == 1 else f"[0-9]{{{count}}}"


def _either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


_INT64 = 1 << 63
_MOST = 10**100
_LONGEST = 40
"""Characters of a number in a message."""
_MOST_CHARS = 1 << 20
"""Of the rules of a schema."""
_LONG = re.compile(r"[0-9]{16}|[0-9][eE]")
_REFERENCE = re.compile(r"#(/(\$defs|definitions)/[^/]+)?")
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_BOUNDS = (*_LOW, *_HIGH)
_EXCLUDES = ("exclusiveMinimum", "exclusiveMaximum")
_DEFINITIONS = ("$defs", "definitions")
_NOTHING = ANNOTATIONS | {"$schema", "$id", "x-guidance", *_DEFINITIONS}
_OF_NUMBERS = frozenset((*_BOUNDS, "multipleOf"))
_OF_ARRAYS = frozenset(("items", "minItems", "maxItems"))
_OF_OBJECTS = frozenset(("properties", "required", "additionalProperties"))
_OF_TEXTS = frozenset(("minLength", "maxLength", "pattern", "format"))
_KNOWN = {"type"} | _OF_NUMBERS | _OF_ARRAYS | _OF_OBJECTS | _OF_TEXTS
_KEY = r'"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"'

Schema = dict[str, Any]


def with_exact_numbers(kind: str, text: str) -> tuple[str, str]:
    """The grammar of `GrammarCompiler.compile` in which numbers hold exactly; nearly always the same. Raises ValueError
    for one with a number that cannot be kept."""
    if kind not in ("json_schema", "grammar") or not _LONG.search(text):
        return kind, text
    effort, rules = Effort(), list[str]()

    def value(schema: str) -> str | None:
        """A rule, or a schema behind `%json`; None where it has no such numbers."""
        root = json.loads(schema)
        if not isinstance(root, dict) or not any(map(_is_inexact, _nodes(root))):
            return None
        if kind == "json_schema":
            root = lark.guided_schema(root)
        try:
            rule = _Rules(root, f"exact_number{len(rules)}_", effort).of_root()
            if sum(map(len, rule)) > _MOST_CHARS:
                raise ValueError
        except (ValueError, TypeError, AttributeError):  # it is no schema, for example
            return f"%json {json.dumps(_narrowed(root))}"
        rules.extend(rule)
        return rule[0].partition(":")[0]

    try:
        if kind == "grammar":
            changed = lark.with_values(text, value)
            return kind, text if changed is None else "\n".join((changed, *rules))
        start = value(text)
        if start is None or not rules:
            return kind, text if start is None else start.removeprefix("%json ")
        return "grammar", "\n".join((f"start: {start}", *rules))
    except json.JSONDecodeError:
        return kind, text  # who compiles it says what is wrong with it


def _nodes(place: Any) -> Iterator[Schema]:
    left = [place]
    while left:
        place = left.pop()
        if isinstance(place, dict):
            yield place
            left += place.values()
        elif isinstance(place, list):
            left += place


def _is_inexact(node: Mapping[str, Any]) -> bool:
    """Whether it has such numbers itself."""
    return any(_is_lost(node.get(keyword)) for keyword in _BOUNDS) or any(map(_has_lost, _choices(node)))


def _choices(node: Mapping[str, Any]) -> list[Any]:
    values = node.get("enum")
    return [*(values if isinstance(values, list) else ()), node.get("const")]


def _has_lost(value: Any) -> bool:
    """Whether there is one in a constant."""
    if isinstance(value, list):
        return any(map(_has_lost, value))
    if isinstance(value, dict):
        return any(map(_has_lost, value.values()))
    return isinstance(value, int) and _is_lost(value)


def _is_lost(value: Any) -> bool:
    if not isinstance(value, int | float):
        return False
    return abs(value) >= _INT64 or (isinstance(value, int) and int(float(value)) != value)


class _Rules:
    """Of one schema."""

    def __init__(self, root: Schema, prefix: str, effort: Effort) -> None:
        """`prefix`: of all names of rules. Raises ValueError where the schema cannot be written so."""
        guidance = root.get("x-guidance", {})
        if has_others_inside(root) or guidance.keys() - {"whitespace_pattern", "whitespace_flexible", "lenient"}:
            raise ValueError
        self._root = root
        self._guidance = guidance
        self._effort = effort
        self._prefix = prefix
        self._definitions = {keyword: root[keyword] for keyword in _DEFINITIONS if keyword in root}
        self._around = {keyword: root[keyword] for keyword in ("$schema",) if keyword in root}
        self._around["x-guidance"] = self._guidance
        self._evaluated = Evaluated(root, effort)
        self._rules: list[str] = []
        self._terminals: dict[str, str] = {}
        self._names: dict[str, str] = {}
        """Of rules, by the references that they stand for."""
        self._open: list[str] = []
        """References whose rules are missing."""
        self._inexact: set[int] = set()
        """Ids of parts of the schema that have inexact numbers somewhere inside, or where they refer to."""
        self._mark()

    def of_root(self) -> list[str]:
        """The first one is the schema's."""
        start = self._reference("#")
        while self._open:
            reference = self._open.pop()
            place = self._root if reference == "#" else self._evaluated.resolved({"$ref": reference})
            if place is None:
                raise ValueError
            self._rules.append(f"{self._names[reference]}: {self._value(place)}")
        first = next(rule for rule in self._rules if rule.startswith(f"{start}:"))
        self._rules.remove(first)
        return [first, *self._rules, *(f"{name}: {pattern}" for pattern, name in self._terminals.items())]

    # -- which parts ---------------------------------------------------------------------------------------------

    def _mark(self) -> None:
        """Raises ValueError for references to other places than definitions."""
        users: dict[str, list[str]] = {}
        pending = []
        for keyword, definitions in self._definitions.items():
            for name, schema in definitions.items():
                reference = f"#/{keyword}/{name.replace('~', '~0').replace('/', '~1')}"
                for used in _references(schema):
                    users.setdefault(used, []).append(reference)
                if any(map(_is_inexact, _nodes(schema))):
                    pending.append(reference)
        if any(not _REFERENCE.fullmatch(reference) for reference in _references(self._root)):
            raise ValueError
        inexact = {"#"}
        while pending:
            reference = pending.pop()
            if reference not in inexact:
                inexact.add(reference)
                pending += users.get(reference, ())
        self._mark_inside(self._root, inexact)

    def _mark_inside(self, place: Any, inexact: set[str]) -> bool:
        inside = place.values() if isinstance(place, dict) else place if isinstance(place, list) else ()
        marks = [self._mark_inside(part, inexact) for part in inside]
        marked = any(marks)
        if isinstance(place, dict):
            marked = marked or _is_inexact(place) or place.get("$ref") in inexact
        if marked:
            self._inexact.add(id(place))
        return marked

    # -- pieces --------------------------------------------------------------------------------------------------

    def _rule(self, body: str) -> str:
        name = f"{self._prefix}{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _terminal(self, pattern: str) -> str:
        self._effort.spend(len(pattern))
        return self._terminals.setdefault(pattern, f"{self._prefix}{len(self._terminals)}".upper())

    def _reference(self, reference: str) -> str:
        if reference not in self._names:
            self._names[reference] = f"{self._prefix}of{len(self._names)}"
            self._open.append(reference)
        return self._names[reference]

    def _schema(self, schema: Any) -> str:
        """What llguidance keeps exactly."""
        if schema is False:
            raise ValueError
        node = {} if schema is True else {key: value for key, value in schema.items() if key not in _DEFINITIONS}
        if next(_references(node), None) is not None:
            node |= self._definitions
        written = json.dumps(node | self._around)
        self._effort.spend(len(written))
        return f"%json {written}"

    def _join(self, *pieces: str) -> str:
        """Pieces with white space between them."""
        pattern = self._guidance.get("whitespace_pattern")
        if pattern is None and self._guidance.get("whitespace_flexible", True):
            pattern = r"[ \n\r\t]+"
        if pattern is None:
            return " ".join(pieces)
        return f" {self._terminal(lark.regex(pattern))}? ".join(pieces)

    # -- schemas -------------------------------------------------------------------------------------------------

    def _value(self, schema: Any) -> str:
        if id(schema) not in self._inexact or not isinstance(schema, dict):
            return self._schema(schema)
        node = {key: value for key, value in schema.items() if key not in _NOTHING}
        match node:
            case {"$ref": reference, **rest} if not rest:
                return self._reference(reference)
            case {"anyOf": schemas, **rest} if not rest:
                return _any(map(self._value, schemas))
            case {"const": value, **rest} if not rest.keys() - {"type"}:
                return self._constants([value], rest.get("type"))
            case {"enum": values, **rest} if not rest.keys() - {"type"}:
                return self._constants(values, rest.get("type"))
            case {"type": str(name)}:
                return self._of_type(name, node)
            case {"type": list(names)}:
                return _any(self._of_type(name, node) for name in names)
        raise ValueError

    def _constants(self, values: list[Any], types: Any) -> str:
        rest = [value for value in values if not _has_lost(value)]
        lost = [value for value in values if _has_lost(value)]
        if types is not None:
            allowed = {types} if isinstance(types, str) else set(types)
            if not allowed & {"integer", "number"} or not all(isinstance(value, int) for value in lost):
                raise ValueError
        exact = {"enum": rest} | ({} if types is None else {"type": types})
        return _any([*map(self._constant, lost), *([self._schema(exact)] if rest else [])])

    def _constant(self, value: Any) -> str:
        if isinstance(value, list):
            return self._join('"["', *self._with_commas(map(self._constant, value)), '"]"')
        if isinstance(value, dict):
            members = (self._join(_text(name), '":"', self._constant(member)) for name, member in value.items())
            return self._join('"{"', *self._with_commas(members), '"}"')
        return _text(value)

    def _with_commas(self, pieces: Iterable[str]) -> list[str]:
        return [part for piece in pieces for part in (_COMMA, piece)][1:]

    def _of_type(self, name: str, node: Schema) -> str:
        if node.keys() - _KNOWN:
            raise ValueError
        match name:
            case "integer" | "number":
                return self._number(name, node)
            case "array":
                return self._array(node)
            case "object":
                return self._object(node)
        return self._schema({key: value for key, value in node.items() if key in _OF_TEXTS} | {"type": name})

    def _number(self, name: str, node: Schema) -> str:
        if not _is_inexact(node):
            return self._schema({key: value for key, value in node.items() if key in _OF_NUMBERS} | {"type": name})
        if "multipleOf" in node:
            raise ValueError
        pattern = _pattern(node, whole=name == "integer")
        if pattern is None:
            raise ValueError
        return self._terminal(lark.regex(pattern))

    def _array(self, node: Schema) -> str:
        items = self._rule(self._value(node.get("items", True)))
        least, most = int(node.get("minItems", 0)), node.get("maxItems")
        if most is not None and int(most) < max(1, least):
            raise ValueError
        more = f"({self._join('', _COMMA, items)}){{{max(0, least - 1)},{'' if most is None else int(most) - 1}}}"
        some = self._join('"["', items if most == 1 else f"{items} {more}", '"]"')
        return some if least else _any((self._join('"["', '"]"'), some))

    def _object(self, node: Schema) -> str:
        properties, required = dict(node.get("properties", {})), node.get("required", ())
        rest = node.get("additionalProperties", True)
        for name in required:
            properties.setdefault(name, rest)
        tail = [] if rest is False else [self._additional(properties, rest)]
        items = [(self._property(name, schema), name in required) for name, schema in properties.items()]
        return self._join('"{"', self._members(items, tail), '"}"')

    def _property(self, name: str, schema: Any) -> str:
        return self._rule(self._join(_text(name), '":"', self._value(schema)))

    def _additional(self, properties: Iterable[str], schema: Any) -> str:
        taken = [json.dumps(json.dumps(name, ensure_ascii=False)) for name in properties]
        pattern = lark.regex(_KEY) + (f" & ~({' | '.join(taken)})" if taken else "")
        member = self._rule(self._join(self._terminal(pattern), '":"', self._value(schema)))
        return f"{member} ({self._join('', _COMMA, member)})*"

    def _members(self, items: list[tuple[str, bool]], tail: list[str]) -> str:
        """In this order, with commas between those that are there. `tail`: what may follow."""
        behind = self._rule(" ".join([f"({self._join('', _COMMA, member)})?" for member in tail]) or '""')
        first = self._rule(" | ".join([*tail, '""']))
        for item, required in reversed(items):
            first = self._rule(f"{item} {behind}" + ("" if required else f" | {first}"))
            behind = self._rule(f"({self._join('', _COMMA, item)}){'' if required else '?'} {behind}")
        return first


_COMMA = '","'


def _any(alternatives: Iterable[str]) -> str:
    rules = list(alternatives)
    if not rules:
        raise ValueError
    return f"({' | '.join(rules)})"


def _text(value: Any) -> str:
    """Exactly what JSON writes for it."""
    return lark.literal(json.dumps(value, ensure_ascii=False), {})


def _references(place: Any) -> Iterator[str]:
    return (node["$ref"] for node in _nodes(place) if isinstance(node.get("$ref"), str))


def _pattern(node: Schema, *, whole: bool) -> str | None:
    """None: no number is within the bounds. Raises ValueError where these cannot be written as a pattern."""
    bounds = [(keyword, node[keyword]) for keyword in _BOUNDS if keyword in node]
    if any(isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _MOST for _, value in bounds):
        raise ValueError
    if whole:
        least = [
            math.floor(value) + 1 if name in _EXCLUDES else math.ceil(value) for name, value in bounds if name in _LOW
        ]
        most = [
            math.ceil(value) - 1 if name in _EXCLUDES else math.floor(value) for name, value in bounds if name in _HIGH
        ]
        return integers_between(max(least, default=None), min(most, default=None))
    if any(int(value) != value for _, value in bounds):
        raise ValueError
    low = [Bound(int(value), excluded=name in _EXCLUDES) for name, value in bounds if name in _LOW]
    high = [Bound(int(value), excluded=name in _EXCLUDES) for name, value in bounds if name in _HIGH]
    tightest = min(high, key=lambda bound: (bound.value, not bound.excluded), default=None)
    return numbers_between(max(low, default=None), tightest)


def _narrowed(place: Any) -> Any:
    """With bounds that f64 has, and that allow less. Raises ValueError where there are none."""
    if isinstance(place, list):
        return [_narrowed(item) for item in place]
    if not isinstance(place, dict):
        return place
    node = {key: _narrowed(value) for key, value in place.items()}
    for value in filter(_has_lost, _choices(node)):
        raise ValueError(_refusal(value))
    for keyword in _BOUNDS:
        if _is_lost(node.get(keyword)):
            node[keyword] = _nearest(node[keyword], keyword in _LOW, whole=node.get("type") != "number")
    return node


def _nearest(bound: float, low: bool, *, whole: bool) -> float:
    """`whole`: llguidance may read it as the bound of integers."""
    sign = 1 if low else -1
    try:
        number = int(float(bound))
    except OverflowError:
        raise ValueError(_refusal(bound)) from None
    if (bound - number) * sign > 0:
        number = int(math.nextafter(number, sign * math.inf))
    if whole and number * sign >= _INT64:
        raise ValueError(_refusal(bound))
    number = max(number, int(math.nextafter(-_INT64, 0))) if whole and low else number
    return number if abs(number) <= _INT64 else float(number)  # whose digits llguidance's reader may round


def _refusal(number: Any) -> str:
    return f"{json.dumps(number)[:_LONGEST]} is a number that is too large to be kept exactly in its place"
