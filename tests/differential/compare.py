"""Two answers compared, against the table of expected differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from differential.differences import Any_, Difference

_MISSING = "<missing>"


def differences(triton: Any, ours: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The leaves that differ: their path, Triton's value, ours. Types count: 1, 1.0 and True are different answers."""
    if isinstance(triton, dict) and isinstance(ours, dict):
        for key in {**triton, **ours}:
            yield from differences(triton.get(key, _MISSING), ours.get(key, _MISSING), f"{path}.{key}" if path else key)
    elif isinstance(triton, list | tuple) and isinstance(ours, list | tuple) and len(triton) == len(ours):
        for index, (left, right) in enumerate(zip(triton, ours, strict=True)):
            yield from differences(left, right, f"{path}.{index}" if path else str(index))
    elif type(triton) is not type(ours) or triton != ours:
        yield path, triton, ours


def unexpected(case: str, triton: Any, ours: Any, table: Sequence[Difference]) -> list[str]:
    """What differs and is not in the table, and what the table says of this case and is not so."""
    rows = [row for row in table if any(fnmatchcase(case, name) for name in row.cases)]
    used: set[tuple[str, str]] = set()
    problems = []
    for path, left, right in differences(triton, ours):
        row = next(((row, name) for row in rows for name in row.fields if _covers(row, name, path, left, right)), None)
        if row is None:
            problems.append(f"{path}:\n  Triton: {left!r}\n  ours:   {right!r}")
        else:
            used.add((row[0].id, row[1]))
    for row in rows:
        unused = [name for name in row.fields if (row.id, name) not in used]
        problems += [f"{row.id}: {name} is expected to differ, and does not so" for name in unused]
    return problems


def _covers(row: Difference, name: str, path: str, left: Any, right: Any) -> bool:
    triton, ours = row.fields[name]
    return fnmatchcase(path, name) and _is(triton, left) and _is(ours, right)


def _is(expected: Any, value: Any) -> bool:
    """Strings are patterns, as long texts differ in what is not of interest."""
    if expected is Any_:
        return True
    if isinstance(expected, str) and isinstance(value, str):
        return fnmatchcase(value, expected)
    return type(expected) is type(value) and bool(expected == value)
