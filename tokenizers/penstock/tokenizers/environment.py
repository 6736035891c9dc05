"""The one Jinja environment for every chat template: sandboxed, bounded, and with what Hugging Face's has."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

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


class TemplateBounds:
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

    def __init__(self, bounds: TemplateBounds) -> None:
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
    bounds = TemplateBounds(DEFAULT_OUTPUT_LIMIT)


_current = _Current()


def current_bounds() -> TemplateBounds:
    """Those of the render that runs in this thread."""
    return _current.bounds


def set_current_bounds(bounds: TemplateBounds) -> None:
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


_UNNEEDED_FILTERS = ("batch", "center", "pprint", "slice", "urlize", "wordwrap", "xmlattr")
"""They make large values out of small ones, and text meant for pages; no chat template uses them."""


class _BoundedCodeGenerator(CodeGenerator):
    """Compiles `~` and output buffers, which the sandbox does not intercept, to bounded ones."""

    def buffer(self, frame: Frame) -> None:
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.new_buffer()")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat_values((")
        for arg in node.nodes:
            self.visit(arg, frame)
            self.write(", ")
        self.write("))")


class _GenerationExtension(Extension):
    """`{% generation %}` marks what the model wrote, for training. Here it only is a scope."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _TemplateNamespace(Namespace):
    """Refuses underscored names, by which Python's own code would look things up on the object."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a namespace takes no names that begin with an underscore")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Every operation that can make a large value asks `bounds.current_bounds` first."""

    code_generator_class = _BoundedCodeGenerator
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationExtension],
            finalize=_check_output,
        )
        for name in _UNNEEDED_FILTERS:
            del self.filters[name]
        for name, guard in _FILTER_GUARDS.items():
            self.filters[name] = _guarded(self.filters[name], guard)
        self.filters["tojson"] = _tojson
        del self.globals["lipsum"]
        self.globals |= {
            "dict": _make_dict,
            "namespace": _TemplateNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def new_buffer(self) -> Buffer:
        return Buffer(current_bounds())

    def concat_values(self, values: tuple[Any, ...]) -> str:
        bounds = current_bounds()
        bounds.charge(sum(map(bounds.size_of, values)))
        return "".join(map(str, values))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_binary_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The names are Jinja's: keyword arguments of the template must not collide with them.
        owner = getattr(__obj, "__self__", None)
        if owner is not None:
            name = getattr(__obj, "__name__", "")
            if name == "join" and args:
                args = (_as_list(args[0]), *args[1:])
            check_method(owner, name, (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        safe_format = super().wrap_str_format(value)
        if safe_format is None:
            return None

        def bounded_format(*args: Any, **kwargs: Any) -> str:
            check_format(value.__self__, (args, kwargs))
            return safe_format(*args, **kwargs)

        return bounded_format


def _check_output(value: Any) -> Any:
    if not isinstance(value, str):
        bounds = current_bounds()
        bounds.charge(bounds.size_of(value))
    return value


def _guarded(function: Callable[..., Any], guard: Callable[..., None]) -> Callable[..., Any]:
    """Calls `guard` with the filter's own arguments before the filter runs."""
    passes_context = hasattr(function, "jinja_pass_arg")

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        own = args[1:] if passes_context else args
        if own and not isinstance(own[0], str) and hasattr(own[0], "__next__"):
            own = (_as_list(own[0]), *own[1:])
            args = (*args[: len(args) - len(own)], *own)
        guard(*own, **kwargs)
        return function(*args, **kwargs)

    return run


def _as_list(items: Iterable[Any]) -> Any:
    """Generators are read out, so that what they yield can be counted; their values exist already or are bounded."""
    if not hasattr(items, "__next__"):
        return items
    bounds, values, size = current_bounds(), [], 0
    for value in items:
        values.append(value)
        size += bounds.size_of(value) + 1
        bounds.check(size)
    return values


def _guard_indent(text: Any, width: int | str = 4, *_: Any, **__: Any) -> None:
    bounds, text = current_bounds(), str(text)
    bounds.charge(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(width)))


def _guard_join(value: Any, d: str = "", attribute: Any = None) -> None:
    check_join(str(d), value)


def _guard_list(value: Any) -> None:
    # A list entry takes eight bytes and a character outside Latin-1 an object of its own.
    if isinstance(value, str | bytes):
        current_bounds().charge(8 * len(value))


def _guard_format(value: Any, *args: Any, **kwargs: Any) -> None:
    check_percent_format(str(value), kwargs or args)


def _guard_string(value: Any) -> None:
    _check_output(value)


def _guard_round(value: Any, precision: int = 0, method: str = "common") -> None:
    if not -100 <= precision <= 100:
        raise TooLarge("round: the precision is out of range")


def _guard_sum(value: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise TooLarge("sum: only numbers can be summed")


def _guard_replace(text: Any, old: Any, new: Any, count: Any = None) -> None:
    check_replace(str(text), str(old), str(new))


_FILTER_GUARDS: dict[str, Callable[..., None]] = {
    "format": _guard_format,
    "indent": _guard_indent,
    "join": _guard_join,
    "list": _guard_list,
    "replace": _guard_replace,
    "round": _guard_round,
    "string": _guard_string,
    "sum": _guard_sum,
}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face defines it: characters stand for themselves, HTML or not."""
    bounds = current_bounds()
    if indent is not None and (indent if isinstance(indent, int) else len(indent)) > 16:
        raise TooLarge("tojson: the indent is too wide")
    bounds.charge(bounds.size_of(value))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """In place of the type itself, whose attributes lead out of the sandbox."""
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 200 or re.search(r"\d{3}", pattern):
        raise TooLarge("strftime_now: the format is too long")
    return datetime.now().strftime(pattern)
