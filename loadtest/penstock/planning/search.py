"""The smallest number that is enough."""

from __future__ import annotations

from collections.abc import Callable


def fewest(enough: Callable[[int], bool], start: int, most: int) -> int | None:
    """By doubling from `start`, then halving the interval; more are reckoned to be enough where fewer are. None: not
    even `most` are."""
    known: dict[int, bool] = {}

    def is_enough(number: int) -> bool:
        if number not in known:
            known[number] = enough(number)
        return known[number]

    high = min(start, most)
    while not is_enough(high):
        if high == most:
            return None
        high = min(2 * high, most)
    low = max((number for number, held in known.items() if not held), default=0)
    if low == 0:  # the first was enough: fewer may be
        while high > 1 and is_enough(max(1, high // 2)):
            high = max(1, high // 2)
        low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high
