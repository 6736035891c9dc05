"""Flags of the command line, derived from the structs that hold the settings: names, types and help stand there."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import NODEFAULT, inspect

Sections = Mapping[str, type[msgspec.Struct]]


def add_sections(
    parser: argparse.ArgumentParser,
    sections: Sections,
    *,
    positional: str = "",
    lists: Collection[str] = (),
    other_names: Mapping[str, str] | None = None,
    only: Collection[str] | None = None,
) -> None:
    """A group of flags for each section; only those that are given end up in the namespace.

    `positional` is the setting that is written without a flag. Settings that take several values are repeated; those
    in `lists` also take them with commas between. `other_names` leads from further names of flags to settings. `only`
    names the settings to take, where that is not all of them.
    """
    for name, section in sections.items():
        fields = [field for field in _fields(section) if only is None or field.name in only]
        if not fields:
            continue
        group = parser.add_argument_group(name, (section.__doc__ or "").strip())
        for field in fields:
            others = [other for other, ours in (other_names or {}).items() if ours == field.name]
            _add_flag(group, field, others, positional=field.name == positional, commas=field.name in lists)


def switches(sections: Sections) -> set[str]:
    """Names of the settings that are on or off."""
    return {
        field.name
        for section in sections.values()
        for field in _fields(section)
        if isinstance(_bare(field.type), inspect.BoolType)
    }


def _add_flag(group: Any, field: inspect.Field, others: Sequence[str], *, positional: bool, commas: bool) -> None:
    kind = _bare(field.type)
    flags = ["--" + name.replace("_", "-") for name in (field.name, *others)]
    options: dict[str, Any] = {"help": _help(field), "default": argparse.SUPPRESS}
    if positional:
        group.add_argument(field.name, nargs="?", metavar=field.name.upper(), **options)
    elif isinstance(kind, inspect.BoolType):
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
    elif isinstance(kind, inspect.LiteralType):
        group.add_argument(*flags, choices=kind.values, **options)
    elif commas:
        each = _metavar(_bare(kind.item_type)) if isinstance(kind, inspect.VarTupleType) else "NAME"
        metavar = f"{each}[,{each}]"
        group.add_argument(*flags, action="extend", type=lambda text: text.split(","), metavar=metavar, **options)
    elif isinstance(kind, inspect.VarTupleType):
        group.add_argument(*flags, action="append", metavar="TEXT", **options)
    else:
        group.add_argument(*flags, metavar=_metavar(kind), **options)


def _bare(kind: inspect.Type) -> inspect.Type:
    """Without bounds and descriptions."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    return kind


@cache  # several commands have the same settings
def _fields(section: type[msgspec.Struct]) -> Sequence[inspect.Field]:
    info = inspect.type_info(section)
    if not isinstance(info, inspect.StructType):
        raise TypeError(f"{section} is not a struct")
    return info.fields


def _help(field: inspect.Field) -> str:
    text = (
        (field.type.extra_json_schema or {}).get("description", "") if isinstance(field.type, inspect.Metadata) else ""
    )
    silent = field.default in (None, (), "", NODEFAULT)
    return text if silent else f"{text} (default: {_shown(field.default)})"


def _shown(default: object) -> object:
    """As one would write it: switches are on or off, whole seconds have no fraction."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, float) and default.is_integer():
        return int(default)
    return ",".join(map(str, default)) if isinstance(default, tuple) else default


def _metavar(kind: inspect.Type) -> str:
    names = {inspect.IntType: "N", inspect.FloatType: "X"}
    if isinstance(kind, inspect.UnionType):
        kind = _bare(next(member for member in kind.types if not isinstance(member, inspect.NoneType)))
    return names.get(type(kind), "TEXT")
