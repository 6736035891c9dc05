"""Flags of the command line, derived from the structs that hold the settings: names, types and help stand there."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import NODEFAULT, inspect

from penstock.gateway.configuration.plain_values import bare, extra, fields_of, plain, quantity_text

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
        fields = [field for field in fields_of(section) if only is None or field.name in only]
        if not fields:
            continue
        group = parser.add_argument_group(name, (section.__doc__ or "").strip())
        for field in fields:
            aliases = [other for other, ours in (other_names or {}).items() if ours == field.name]
            _add_flag(group, field, aliases, positional=field.name == positional, commas=field.name in lists)


def switches(sections: Sections) -> set[str]:
    """Names of the settings that are on or off."""
    return {
        field.name
        for section in sections.values()
        for field in fields_of(section)
        if isinstance(bare(field.type), inspect.BoolType)
    }


def _add_flag(group: Any, field: inspect.Field, aliases: Sequence[str], *, positional: bool, commas: bool) -> None:
    kind = bare(field.type)
    flags = ["--" + name.replace("_", "-") for name in (field.name, *aliases)]
    options: dict[str, Any] = {"help": _help(field), "default": argparse.SUPPRESS}
    metavar = _metavar(field.type)
    if positional:
        group.add_argument(field.name, nargs="?", metavar=field.name.upper(), **options)
    elif isinstance(kind, inspect.BoolType):
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
    elif isinstance(kind, inspect.LiteralType):
        group.add_argument(*flags, type=lambda text: _read(text, field.type), choices=kind.values, **options)
    elif commas:
        metavar = f"{metavar}[,{metavar}]"
        group.add_argument(*flags, action="extend", type=lambda text: text.split(","), metavar=metavar, **options)
    elif isinstance(kind, inspect.VarTupleType):
        group.add_argument(*flags, action="append", metavar=metavar, **options)
    else:
        group.add_argument(*flags, type=lambda text: _read(text, field.type), metavar=metavar, **options)


def _read(text: str, kind: inspect.Type) -> Any:
    try:
        return plain(text, kind)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _help(field: inspect.Field) -> str:
    text = (
        (field.type.extra_json_schema or {}).get("description", "") if isinstance(field.type, inspect.Metadata) else ""
    )
    silent = field.default in (None, (), "", NODEFAULT)
    return text if silent else f"{text} (default: {_shown(field)})"


def _shown(field: inspect.Field) -> object:
    """As one would write it: switches are on or off, quantities have units, whole numbers no fraction."""
    default, unit = field.default, extra(field.type, "unit")
    if isinstance(default, bool):
        return "on" if default else "off"
    if unit is not None:
        return quantity_text(default, unit)
    if isinstance(default, float) and default.is_integer():
        return int(default)
    return ",".join(map(str, default)) if isinstance(default, tuple) else default


def _metavar(kind: inspect.Type) -> str:
    unit = extra(kind, "unit")
    if unit is not None:
        return "SIZE" if unit in ("bytes", "memory") else "DURATION"
    plain_kind = bare(kind)
    if isinstance(plain_kind, inspect.VarTupleType):
        plain_kind = bare(plain_kind.item_type)
    number = isinstance(plain_kind, inspect.IntType | inspect.FloatType)
    return extra(kind, "metavar") or ("N" if number else "TEXT")
