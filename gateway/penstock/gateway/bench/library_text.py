"""A text that every Python has: its standard library. The same interpreter always gives the same text."""

from __future__ import annotations

import ast
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

_CHARACTERS_OF_MODULE = 2000
"""At most: a text of a few thousand tokens then is of many modules."""


def library_text(kind: str, characters: int) -> str:
    """At least so many characters, if there are as many, of `docstrings` or `sources`.

    Of the modules of one file each, in the order of their names' CRC-32, which is as good as random: their beginnings.
    """
    parts: list[str] = []
    length = 0
    for path in _modules(Path(sysconfig.get_path("stdlib"))):
        source = path.read_text(encoding="utf-8", errors="replace")
        part = source if kind == "sources" else "\n\n".join(_docstrings(source))
        part = part[:_CHARACTERS_OF_MODULE].strip()
        if part:
            parts.append(part)
            length += len(part) + 2
        if length >= characters:
            break
    return "\n\n".join(parts)


def _modules(folder: Path) -> list[Path]:
    public = [path for path in folder.glob("*.py") if not path.name.startswith("_")]
    return sorted(public, key=lambda path: (zlib.crc32(path.name.encode()), path.name))


def _docstrings(source: str) -> Iterator[str]:
    """In the order in which they stand there."""
    module = ast.parse(source)
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    described = [node for node in ast.walk(module) if isinstance(node, kinds)]
    for node in sorted(described, key=lambda node: getattr(node, "lineno", 0)):
        text = ast.get_docstring(node)
        if text:
            yield text
