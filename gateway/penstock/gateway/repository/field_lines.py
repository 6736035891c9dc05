"""In which line of a config.pbtxt a field stands. protobuf for Python does not tell."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"""\#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[\w.+-]+|\S""")
_NAME_FOLLOWED_BY = re.compile(r"(?:\s|#[^\n]*\n)*[:{<\[]")


def field_lines(text: str) -> dict[str, int]:
    """Line numbers from 1 by path (`instance_group.count`); of a field that occurs several times, the first.

    The text has been parsed before: of what is not text format, nothing sensible is said, and nothing is raised.
    """
    lines: dict[str, int] = {}
    inside: list[str | None] = []
    """The fields whose messages a token is in; None for a list of them."""
    name: str | None = None
    line, position = 1, 0
    for match in _TOKEN.finditer(text):
        line += text.count("\n", position, match.start())
        position = match.start()
        token = match.group()
        if token == "[":
            inside.append(None)
        elif token in ("{", "<"):
            inside.append(name)
        elif token in ("}", ">", "]"):
            name = (inside.pop() if inside else None) or name
        elif token.isidentifier() and _NAME_FOLLOWED_BY.match(text, match.end()):
            name = token
            lines.setdefault(".".join([*filter(None, inside), name]), line)
    return lines
