"""Parsers by name: those that ship with Penstock, and those of other packages."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from ..output_stages import OutputStage


class ParserRegistry:
    """`group` is the entry-point group of other packages. A name that ships with Penstock is always ours."""

    def __init__(self, kind: str, group: str, shipped: Mapping[str, type[OutputStage]]) -> None:
        self._kind = kind
        self._group = group
        self._shipped = shipped

    def names(self) -> list[str]:
        """What `find` knows, sorted; nothing is imported."""
        return sorted({*self._shipped, *self._entries()})

    def find(self, name: str) -> type[OutputStage]:
        """The class of this name. Of other packages, only the module of this one is imported.

        Raises ValueError for an unknown name, with the known ones, and for an entry point that cannot be used.
        """
        shipped = self._shipped.get(name)
        if shipped is not None:
            return shipped
        entry = self._entries().get(name)
        if entry is None:
            raise ValueError(f"no {self._kind} parser is called '{name}'; there are {', '.join(self.names())}")
        try:
            parser = entry.load()
        except (ImportError, AttributeError) as error:
            raise ValueError(f"the {self._kind} parser '{name}' cannot be imported: {error}") from error
        if not (isinstance(parser, type) and issubclass(parser, OutputStage)):
            raise ValueError(f"the entry point '{name}' of {self._group} is not a class of OutputStage")
        return parser

    def _entries(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=self._group)}
