"""Pieces of grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

SPACE = r"[ \t\n\r]{0,4}"
"""A regular expression: white space that models write between the parts of their output."""
JSON_SPACE = r"( |\n[ \t]{0,20})"
"""The same between the tokens of JSON, where it may be left out. Without a bound, a model that is at a loss writes
spaces until its tokens are used up."""

_TOKENS = re.compile(
    r"""//[^\n]*|\#[^\n]*|<[^<>\s]+>|"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\\n])*/?|(?P<schema>%json\s*(?=\{))"""
)
"""Comments, special tokens, texts and regular expressions, in which `%json` means nothing, and schemas. One without an
end is taken to the end of its line: to look for the end again behind each of its quotes would take minutes."""


def literal(text: str, special_ids: Mapping[str, int]) -> str:
    """Exactly this text, in which special tokens are themselves: no text matches them. `special_ids`: by their text."""
    return " ".join(
        f"<[{special_ids[piece]}]>" if piece in special_ids else json.dumps(piece) for piece in split(text, special_ids)
    )


def split(text: str, special_ids: Iterable[str]) -> list[str]:
    """The text in pieces, each a special token or free of them."""
    longest_first = sorted(special_ids, key=len, reverse=True)
    if not longest_first:
        return [text] if text else []
    return [piece for piece in re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if piece]


def regex(pattern: str) -> str:
    """A terminal for this regular expression, in which no slash is escaped yet."""
    return "/" + pattern.replace("/", r"\/") + "/"


def json_value(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """JSON that this schema allows, as in `guided_schema`."""
    return f"%json {json.dumps(guided_schema(schema, lenient=lenient))}"


def guided_schema(schema: Mapping[str, Any], *, lenient: bool = False) -> dict[str, Any]:
    """The schema with what llguidance should know. `lenient`: keywords that it does not know mean nothing. What the
    schema itself says about white space (`x-guidance`) holds."""
    own = schema.get("x-guidance")
    guidance = {"whitespace_pattern": JSON_SPACE} | (own if isinstance(own, dict) else {}) | {"lenient": lenient}
    return {**schema, "x-guidance": guidance}


def with_schemas(grammar: str, other: Callable[[str], str | None]) -> str | None:
    """The grammar with other schemas behind each `%json`. `other` says which; None keeps one as it is. None: all stay.

    Raises ValueError if a schema is not JSON.
    """

    def value(schema: str) -> str | None:
        changed = other(schema)
        return None if changed is None else f"%json {changed}"

    return with_values(grammar, value)


def with_values(grammar: str, other: Callable[[str], str | None]) -> str | None:
    """As `with_schemas`, with something else for each `%json` and its schema together."""
    pieces: list[str] = []
    done = place = 0
    while token := _TOKENS.search(grammar, place):
        place = token.end()
        if token["schema"] is None:
            continue
        _, end = json.JSONDecoder().raw_decode(grammar, place)
        changed = other(grammar[place:end])
        if changed is not None:
            pieces += grammar[done : token.start()], changed
            done = end
        place = end
    return "".join((*pieces, grammar[done:])) if pieces else None


def up_to(text: str) -> str:
    """A regular expression for anything that ends with the first occurrence of this text; only of a lazy terminal."""
    return r"(.|\n)*" + re.escape(text).replace("\\\n", r"\n")
