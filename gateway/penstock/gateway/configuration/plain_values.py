"""Values of settings as people write them: sizes and durations with units, paths that begin with ~.

`unit` and `metavar` stand in the `extra` of a setting's type (`configuration.sections.types`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from penstock.engines.errors import InvalidRequestError
from penstock.engines.host.memory import parse_memory
from penstock.engines.quantities import duration_text, parse_duration, parse_size, size_text

_PATHS = ("FILE", "DIR")


@cache  # several commands have the same settings
def fields_of(section: type[msgspec.Struct]) -> Sequence[inspect.Field]:
    info = inspect.type_info(section)
    if not isinstance(info, inspect.StructType):
        raise TypeError(f"{section} is not a struct")
    return info.fields


def bare(kind: inspect.Type) -> inspect.Type:
    """Without bounds and descriptions, and without None where there is one other type."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        members = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
        return bare(members[0]) if len(members) == 1 else kind
    return kind


def extra(kind: inspect.Type, name: str) -> str | None:
    """What the `extra` of a type says, or of a type in it: of the one beside None, of the items of a tuple."""
    if isinstance(kind, inspect.Metadata):
        return (kind.extra or {}).get(name) or extra(kind.type, name)
    inner = kind.types if isinstance(kind, inspect.UnionType) else ()
    if isinstance(kind, inspect.VarTupleType):
        inner = (kind.item_type,)
    return next(filter(None, (extra(member, name) for member in inner)), None)


def plain_settings(section: type[msgspec.Struct], settings: Mapping[str, Any]) -> dict[str, Any]:
    """As `plain`, of a section's settings by name. Raises ValueError, naming the setting."""
    return _plain_fields(settings, fields_of(section))


def plain(value: Any, kind: inspect.Type) -> Any:
    """A value for msgspec: a number in the setting's unit in place of a text like "10GiB" or "5m", a path with the home
    folder in place of ~, and one of several words as it is written here, whatever its case. All others are as they
    were, also in lists and tables. Raises ValueError."""
    if isinstance(value, str):
        return _plain_text(value, kind)
    kind = bare(kind)
    if isinstance(kind, inspect.UnionType):
        for member in kind.types:
            value = plain(value, member)
    elif isinstance(kind, inspect.StructType) and isinstance(value, Mapping):
        return _plain_fields(value, kind.fields)
    elif isinstance(kind, inspect.VarTupleType) and isinstance(value, list | tuple):
        return [plain(item, kind.item_type) for item in value]
    return value


def _plain_fields(values: Mapping[str, Any], fields: Sequence[inspect.Field]) -> dict[str, Any]:
    kinds = {field.encode_name: field.type for field in fields}
    converted = dict(values)
    for name in converted.keys() & kinds.keys():
        try:
            converted[name] = plain(converted[name], kinds[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return converted


def _plain_text(text: str, kind: inspect.Type) -> str | float:
    unit = extra(kind, "unit")
    if unit is not None and not _is_number(text):
        return _quantity(text, unit, whole=isinstance(bare(kind), inspect.IntType))
    if isinstance(literal := bare(kind), inspect.LiteralType):
        words = (word for word in literal.values if isinstance(word, str))
        return next((word for word in words if word.lower() == text.lower()), text)
    if text.startswith("~") and extra(kind, "metavar") in _PATHS:
        return os.path.expanduser(text)
    return text


def _is_number(text: str) -> bool:
    """One without a unit: msgspec reads it, and checks its bounds."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _quantity(text: str, unit: Any, *, whole: bool) -> str | float:
    if unit == "bytes":
        return parse_size(text)
    if unit == "memory":
        try:
            parse_memory(text, free=100)
        except InvalidRequestError as error:
            raise ValueError(error.message) from None
        return text
    number = parse_duration(text, unit)
    if whole and not number.is_integer():
        raise ValueError(f"{text!r} is not a whole number of {unit}")
    return int(number) if whole else number


def quantity_text(number: float, unit: Any) -> str:
    """A default as people write it."""
    return size_text(int(number)) if unit == "bytes" else duration_text(number, unit)
