"""In which order combinations are tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from penstock.loadtest.tune.params import Combination, Param

Score = tuple[float, ...]
"""More is better, compared from the left."""
Evaluate = Callable[[Combination], Score]


def exhaustive(params: Sequence[Param], evaluate: Evaluate) -> None:
    """All of them."""
    for values in product(*(param.values for param in params)):
        evaluate(dict(zip((param.name for param in params), values, strict=True)))


def quick(params: Sequence[Param], evaluate: Evaluate) -> None:
    """Coordinate ascent: from the first values on, the best value of one parameter after the other, with the others as
    they are, until a whole round changes nothing. Finds the best of all where parameters do not depend on each other,
    else one that no single change makes better. Nothing is tried twice."""
    known: dict[tuple[str, ...], Score] = {}

    def score(combination: Combination) -> Score:
        key = tuple(combination.values())
        if key not in known:
            known[key] = evaluate(combination)
        return known[key]

    best = {param.name: param.values[0] for param in params}
    score(best)
    while True:
        before = dict(best)
        for param in params:
            ways = [best, *({**best, param.name: value} for value in param.values)]
            best = max(ways, key=score)  # the first of equals: what it was
        if best == before:
            return


STRATEGIES = {"exhaustive": exhaustive, "quick": quick}
