"""The one Jinja environment for every chat template: sandboxed, bounded, and with what Hugging Face's has."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable
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

from .bounds import (
    Buffer,
    TooLarge,
    check_binary_operation,
    check_format,
    check_join,
    check_method,
    check_percent_format,
    check_replace,
    current_bounds,
)

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
