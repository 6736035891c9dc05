"""The text of a perplexity, as tokens."""

from __future__ import annotations

import ast
import hashlib
import platform
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.commands.bench.options import PerplexityBench
from penstock.gateway.commands.bench.perplexity_report import Text
from penstock.tokenizers import Tokenizer

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


_CHARACTERS_OF_TOKEN = 8
"""More than a token of such a text has on average."""


def read_text(tokenizer: Tokenizer, options: PerplexityBench, file: Path | None) -> tuple[Text, list[int]]:
    """What it is, and its tokens. Raises OSError and InvalidRequestError for a file that cannot be read, and
    for a text that is too short."""
    if file is None:
        source = f"{options.stdlib} of the standard library of Python {platform.python_version()}"
        text = library_text(options.stdlib, options.text_tokens * _CHARACTERS_OF_TOKEN)
    else:
        source = file.name
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"text: {file} is not in UTF-8: {error}") from None
    token_ids = tokenizer.encode(text, add_special_tokens=False)[: options.text_tokens]
    if len(token_ids) < 2:
        raise InvalidRequestError("the text has no token with another one before it")
    digest = hashlib.sha256(np.array(token_ids, "<u4").tobytes()).hexdigest()
    return Text(source, digest, len(token_ids)), token_ids


def first_token(tokenizer: Tokenizer) -> int | None:
    """What the tokenizer puts before a text; None: nothing."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    return whole[0] if whole[:1] != bare[:1] else None
