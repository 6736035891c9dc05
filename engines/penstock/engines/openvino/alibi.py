"""Slopes of ALiBi (arXiv:2108.12409)."""

from __future__ import annotations

import math


def alibi_slopes(heads: int) -> list[float]:
    """By which a head's scores fall with each token of distance. Powers of one number; with a number of heads that is
    no power of two, the rest comes from the powers for twice as many heads, every other one."""
    whole = 1 << (heads.bit_length() - 1)
    rest = _powers(2 * whole)[::2][: heads - whole]
    return _powers(whole) + rest


def _powers(heads: int) -> list[float]:
    base = 2.0 ** -(2.0 ** -(math.log2(heads) - 3))
    return [base**n for n in range(1, heads + 1)]
