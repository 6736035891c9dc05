"""Bounds on the memory that a chat template may take: each value's size is known before the value is made."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any

DEFAULT_OUTPUT_LIMIT = 16 * 1024 * 1024
"""Characters. A million tokens are about four million."""
_LARGE = 4096
_MOST_BITS = 1 << 14
_DIGITS = re.compile(r"[0-9]+")
_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%]*")
_STAR_WIDTH = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.]*\*")
_BRACE_FIELD = re.compile(r"\{[^{}]*")
_NESTED_FIELD = re.compile(r"\{[^{}]*\{")


class TooLarge(Exception):
    """A value of the template would exceed the bounds."""


class Bounds:
    """`limit` bounds each value and the output; 8 times that bounds the sum of all large values of a render."""

    __slots__ = ("_budget", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._budget = 8 * limit

    def check(self, size: int) -> None:
        """Raises TooLarge for a value of `size` characters or elements."""
        if size > self.limit:
            raise TooLarge(f"the chat template makes a value of more than {self.limit} characters")

    def charge(self, size: int) -> None:
        """The same for a value that is about to be made; small ones are not counted, there are too many."""
        self.check(size)
        if size > _LARGE:
            self._budget -= size
            if self._budget < 0:
                raise TooLarge("the chat template makes too many large values")

    def size_of(self, value: Any) -> int:
        """Length of `str(value)`, roughly; counting stops above the limit (shared parts count each time)."""
        if isinstance(value, str | bytes):
            return len(value)
        size, waiting = 0, [value]
        while waiting and size <= self.limit:
            item = waiting.pop()
            size += len(item) + 4 if isinstance(item, str | bytes) else 4
            if isinstance(item, Mapping):
                waiting += item.keys()
                waiting += item.values()
            elif isinstance(item, list | tuple | set | frozenset):
                waiting += item
        return size


class Buffer(list[str]):
    """Collects rendered text up to the limit. Empty pieces count too, a list entry being eight bytes."""

    __slots__ = ("_room",)

    def __init__(self, bounds: Bounds) -> None:
        super().__init__()
        self._room = bounds.limit

    def append(self, text: str) -> None:
        self._room -= len(text) or 1
        if self._room < 0:
            raise TooLarge("the chat template's output is too long")
        super().append(text)

    def extend(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.append(text)


class _Current(threading.local):
    bounds = Bounds(DEFAULT_OUTPUT_LIMIT)


_current = _Current()


def current_bounds() -> Bounds:
    """Those of the render that runs in this thread."""
    return _current.bounds


def set_current_bounds(bounds: Bounds) -> None:
    _current.bounds = bounds


def check_binary_operation(operator: str, left: Any, right: Any) -> None:
    """Raises TooLarge where `left operator right` would be too large. Operators `+ * ** %`."""
    bounds = current_bounds()
    if isinstance(left, int) and isinstance(right, int):
        bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * abs(right)}
        if bits.get(operator, 0) > _MOST_BITS:
            raise TooLarge("the chat template computes a number that is too large")
    elif operator == "+":
        bounds.charge(_length(left) + _length(right))
    elif operator == "*":
        sequence, count = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(count, int):
            bounds.charge(_length(sequence) * max(count, 0))
    elif operator == "%" and isinstance(left, str | bytes):
        check_percent_format(left, right)


def _length(value: Any) -> int:
    """Of a string in characters, of any other sequence eight for each element, 0 for what has no length."""
    if isinstance(value, str | bytes):
        return len(value)
    return 8 * len(value) if hasattr(value, "__len__") else 0


def check_percent_format(template: str | bytes, values: Any) -> None:
    """For `template % values`."""
    text = template if isinstance(template, str) else template.decode("latin-1")
    if _STAR_WIDTH.search(text):
        raise TooLarge("the chat template computes the width of a format")
    _charge_format(text, _PERCENT_FIELD.findall(text), values)


def check_format(template: str, values: Any) -> None:
    """For `template.format(...)` and `template.format_map(...)`."""
    if _NESTED_FIELD.search(template.replace("{{", "")):
        raise TooLarge("the chat template computes the width of a format")
    _charge_format(template, _BRACE_FIELD.findall(template), values)


def _charge_format(text: str, fields: list[str], values: Any) -> None:
    """Each field may be as wide as the numbers in it say, and show all of the values."""
    bounds = current_bounds()
    widths = sum(min(int(digits[:12]), bounds.limit + 1) for field in fields for digits in _DIGITS.findall(field))
    bounds.charge(len(text) + widths + len(fields) * bounds.size_of(values))


def check_method(owner: Any, name: str, args: tuple[Any, ...]) -> None:
    """For methods of built-in values that can make large ones out of small ones."""
    bounds = current_bounds()
    if isinstance(owner, str | bytes | int) and name not in ("find", "index", "rfind", "rindex", "startswith"):
        for arg in args:
            if isinstance(arg, int):
                bounds.charge(arg * owner.count("\t") if name == "expandtabs" and isinstance(owner, str) else arg)
    if not isinstance(owner, str | bytes):
        return
    if name == "replace" and len(args) >= 2:
        check_replace(owner, args[0], args[1])
    elif name == "join" and args:
        check_join(owner, args[0])
    elif name == "translate" and args:
        bounds.charge(len(owner) * max(map(bounds.size_of, _values(args[0])), default=1))
    elif name in ("split", "rsplit", "splitlines"):
        separator = args[0] if args and isinstance(args[0], str | bytes) and args[0] else None
        pieces = len(owner) // 2 if separator is None else owner.count(separator)  # type: ignore[arg-type]
        bounds.charge(len(owner) + 8 * pieces)


def check_replace(text: str | bytes, old: Any, new: Any) -> None:
    """For `text.replace(old, new)`."""
    if isinstance(old, type(text)) and isinstance(new, type(text)):
        grow = max(0, len(new) - len(old))
        current_bounds().charge(len(text) + (grow and text.count(old) * grow))  # type: ignore[arg-type]


def check_join(separator: str | bytes, items: Any) -> None:
    """For `separator.join(items)`."""
    bounds = current_bounds()
    if hasattr(items, "__len__"):
        bounds.charge(bounds.size_of(items) + len(items) * len(separator))


def _values(table: Any) -> Iterable[Any]:
    return table.values() if isinstance(table, Mapping) else ()
