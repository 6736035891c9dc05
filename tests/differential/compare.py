"""Two answers compared, against the table of expected differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from differential.differences import ANY, MISSING, Difference


def differences(triton: Any, ours: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The leaves that differ: their path, Triton's value, ours. Types count: 1, 1.0 and True are different answers."""
    if isinstance(triton, dict) and isinstance(ours, dict):
        for key in {**triton, **ours}:
            yield from differences(triton.get(key, MISSING), ours.get(key, MISSING), f"{path}.{key}" if path else key)
    elif isinstance(triton, list | tuple) and isinstance(ours, list | tuple) and len(triton) == len(ours):
        for index, (left, right) in enumerate(zip(triton, ours, strict=True)):
            yield from differences(left, right, f"{path}.{index}" if path else str(index))
    elif type(triton) is not type(ours) or triton != ours:
        yield path, triton, ours


def unexpected(case: str, triton: Any, ours: Any, table: Sequence[Difference]) -> list[str]:
    """What differs and is not in the table, and what the table says of this case and is not so."""
    unused: dict[tuple[str, str], tuple[Any, Any]] = {
        (row.id, name): pair
        for row in table
        for shown in row.shown
        if any(fnmatchcase(case, pattern) for pattern in shown.cases)
        for name, pair in shown.fields.items()
    }
    expected = dict(unused)
    problems = []
    for path, left, right in differences(triton, ours):
        found = [key for key, pair in expected.items() if fnmatchcase(path, key[1]) and _is(pair, left, right)]
        if not found:
            problems.append(f"{path}:\n  Triton: {left!r}\n  ours:   {right!r}")
        for key in found[:1]:
            unused.pop(key, None)
    return problems + [f"{row}: {name} is expected to differ, and does not so" for row, name in unused]


def _is(pair: tuple[Any, Any], triton: Any, ours: Any) -> bool:
    return _matches(pair[0], triton) and _matches(pair[1], ours)


def _matches(expected: Any, value: Any) -> bool:
    if expected is ANY:
        return True
    if isinstance(expected, str) and isinstance(value, str):
        return fnmatchcase(value, expected)
    return type(expected) is type(value) and bool(expected == value)
