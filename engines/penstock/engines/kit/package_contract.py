"""A check, by name, of what an engine uses of a package whose interface may change; made before it is used.

A path is `module:name.name`. A release that moved something is refused with the name of what has moved, instead of
showing it by wrong tokens later.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata
from operator import attrgetter
from typing import Any

from penstock.engines.errors import EngineError


@dataclass(frozen=True)
class Contract:
    calls: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Callables and the parameters that they must take."""
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Data classes, msgspec structs and pydantic models, and the fields that they must have."""
    ordered: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Named tuples that are used by position, and what their first positions must be."""
    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Classes and what their `__init__` must set."""
    present: tuple[str, ...] = ()
    """What must be there, whatever it is."""

    def check(self, product: str, version: str) -> None:
        """Raises EngineError that names everything that is not where it was."""
        refuse(product, version, list(self.differences()))

    def differences(self) -> Iterator[str]:
        """What of the contract does not hold with the installed package, in words."""
        for path in (*self.calls, *self.fields, *self.ordered, *self.attributes, *self.present):
            try:
                there = resolve(path)
            except (ImportError, AttributeError) as e:
                yield f"{path} is gone ({e})"
                continue
            yield from self._misses(path, there)

    def _misses(self, path: str, there: Any) -> Iterator[str]:
        if path in self.calls:
            yield from _missing(path, "parameter", self.calls[path], inspect.signature(there).parameters)
        if path in self.fields:
            yield from _missing(path, "field", self.fields[path], field_names(there))
        if path in self.attributes:
            names = inspect.unwrap(there.__init__).__code__.co_names
            yield from _missing(path, "attribute", self.attributes[path], names)
        if path in self.ordered and tuple(there._fields[: len(self.ordered[path])]) != self.ordered[path]:
            yield f"{path} begins with {', '.join(there._fields)}"


def installed_release(
    distributions: Sequence[str],
    oldest: tuple[int, int],
    too_new: tuple[int, int],
    version_of: Callable[[str], str] = metadata.version,
) -> str | None:
    """The version of the first of `distributions` that is installed, such as "1.2.1"; None: none is. Raises EngineError
    for one that is older than `oldest`, or not older than `too_new`."""
    for name in distributions:
        try:
            version = version_of(name)
        except metadata.PackageNotFoundError:
            continue
        match = re.match(r"(\d+)\.(\d+)", version)
        if match is None or not oldest <= (int(match[1]), int(match[2])) < too_new:
            first, end = (".".join(map(str, bound)) for bound in (oldest, too_new))
            raise EngineError(
                f"{name} {version} is installed, but this engine needs {first} or newer and older than {end}: "
                f"pip install '{distributions[0]}>={first},<{end}'"
            )
        return version
    return None


def refuse(product: str, version: str, moved: Sequence[str]) -> None:
    """Raises EngineError if anything has moved."""
    if moved:
        raise EngineError(f"{product} {version} is not what this engine was made for: {'; '.join(moved)}")


def missing_attributes(name: str, thing: object, paths: Iterable[str]) -> list[str]:
    """Which of the dotted paths below `thing`, called `name`, are not there, in words."""
    missing = []
    for path in paths:
        try:
            attrgetter(path)(thing)
        except AttributeError as e:
            missing.append(f"{name}.{path} is gone ({e})")
    return missing


def resolve(path: str) -> Any:
    """What stands at `module:name.name`."""
    module, _, names = path.partition(":")
    thing: Any = import_module(module)
    for name in names.split("."):
        thing = getattr(thing, name)
    return thing


def field_names(there: Any) -> set[str]:
    """Of a dataclass, a pydantic model or a msgspec struct."""
    if dataclasses.is_dataclass(there):
        return {f.name for f in dataclasses.fields(there)}
    if hasattr(there, "model_fields"):
        return set(there.model_fields)
    return set(there.__struct_fields__)


def _missing(path: str, kind: str, names: Iterable[str], there: Iterable[str]) -> Iterator[str]:
    known = set(there)
    yield from (f"{path} has no {kind} {name!r}" for name in names if name not in known)
