"""Bounds on schemas for llguidance, which pays for some keywords before it looks at bounds of its own.

For each item that `minItems` and `maxItems` name it makes a part of a grammar: 100 bytes and 2 us each. For
`multipleOf` it builds an automaton with a state for each remainder: with 1000003 that takes 10 s and 290 MB, with
123456789 all of the memory. So a short schema could end any engine that uses llguidance.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any

from . import lark

MOST_ITEMS = 1 << 16
"""Of all arrays of a grammar together."""
_MOST_REMAINDERS = 1 << 17
"""About two seconds."""
_LONGEST_NUMBER = 32
"""Characters. llguidance takes up to twelve digits."""
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*-?([0-9][0-9.eE+-]*)')
_ESCAPED = re.compile(r"\\u00([0-7][0-9a-fA-F])")


def check_schema_bounds(kind: str, text: str) -> None:
    """`kind` and `text` as in `GrammarCompiler.compile`. Raises ValueError for what would take too much."""
    _check_divisors(text)
    _check_item_counts(kind, text)


def _check_divisors(text: str) -> None:
    """Raises ValueError where the numbers that values have to be multiples of are too large together: several may hold
    for one value, which then is a multiple of all."""
    plain = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)
    together = 1
    for number in set(_MULTIPLE.findall(plain)):
        together = math.lcm(together, _coefficient(number))
        if together > _MOST_REMAINDERS and str(together).strip("0") != "1":  # for powers of ten only digits are counted
            raise ValueError(f"Values for 'multipleOf' are too large, also together: {number[:_LONGEST_NUMBER]}")


def _coefficient(number: str) -> int:
    """Without a decimal point: 25 for 0.25. 0 counts as 1: the compiler refuses it."""
    try:
        _, digits, exponent = Decimal(number[:_LONGEST_NUMBER]).normalize().as_tuple()
    except ArithmeticError:
        return 1  # no number: the compiler says so
    if len(number) > _LONGEST_NUMBER or not isinstance(exponent, int) or exponent > _LONGEST_NUMBER:
        return _MOST_REMAINDERS + 1
    return int("".join(map(str, digits))) * 10 ** max(0, exponent) or 1


def _check_item_counts(kind: str, text: str) -> None:
    """Raises ValueError for a grammar with more items."""
    schemas: list[Any] = []

    def keep(schema: str) -> None:
        schemas.append(json.loads(schema))

    with suppress(json.JSONDecodeError):  # who compiles it says what is wrong with it
        if kind == "json_schema":
            keep(text)
        elif kind == "grammar":
            lark.with_schemas(text, keep)
    if _num_items(schemas) > MOST_ITEMS:
        raise ValueError(f"minItems and maxItems of its arrays are more than {MOST_ITEMS} together")


def _num_items(node: Any) -> float:
    total, left = 0.0, [node]
    while left:
        node = left.pop()
        if isinstance(node, Mapping):
            counts = (node.get("minItems"), node.get("maxItems"))
            total += sum(max(0, count) for count in counts if isinstance(count, int | float))
            left += node.values()
        elif isinstance(node, list):
            left += node
    return total
