"""A bound on `multipleOf`, for which llguidance builds an automaton with a state for each remainder.

No bound of its own counts these: with 1000003 it takes 10 s and 290 MB, with 123456789 all memory that there is.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

_MOST = 1 << 17
"""About two seconds."""
_LONGEST = 32
"""Characters. llguidance takes up to twelve digits."""
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*-?([0-9][0-9.eE+-]*)')
_ESCAPED = re.compile(r"\\u00([0-7][0-9a-fA-F])")


def check_divisors(text: str) -> None:
    """`text`: a JSON schema, or a grammar with schemas in it. Raises ValueError where the numbers that values have to
    be multiples of are too large together: several may hold for one value, which then is a multiple of all."""
    plain = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)
    together = 1
    for number in set(_MULTIPLE.findall(plain)):
        together = math.lcm(together, _coefficient(number))
        if together > _MOST and str(together).strip("0") != "1":  # for powers of ten only digits are counted
            raise ValueError(f"Values for 'multipleOf' are too large, also together: {number[:_LONGEST]}")


def _coefficient(number: str) -> int:
    """Without a decimal point: 25 for 0.25. 0 counts as 1: the compiler refuses it."""
    try:
        _, digits, exponent = Decimal(number[:_LONGEST]).normalize().as_tuple()
    except ArithmeticError:
        return 1  # no number: the compiler says so
    if len(number) > _LONGEST or not isinstance(exponent, int) or exponent > _LONGEST:
        return _MOST + 1
    return int("".join(map(str, digits))) * 10 ** max(0, exponent) or 1
