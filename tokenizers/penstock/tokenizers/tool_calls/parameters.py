"""Arguments that are written one by one, each as text between tags."""

from __future__ import annotations

from collections.abc import Sequence

from ..parsing import Reading, Tags
from ..parsing.json_text import quoted
from ..parsing.typed_text import STRING, Types, parameter_types, typed_json
from .stage import ToolCallStage
from .tool import Tool


class ParameterStage(ToolCallStage):
    """Writes arguments as JSON, of the types in the tool's schema. A string is passed on as it comes, and a value of
    another type when it is complete."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._types: dict[str, Types] = {}
        self._separator = "{"

    def begin(self, name: str, id: str | None = None) -> None:
        super().begin(name, id)
        tool = self.tools.get(name)
        self._types = parameter_types(tool.parameters) if tool else {}
        self._separator = "{"

    def read_value(self, key: str, ends: Tags, *, on_own_lines: bool = False) -> Reading[None]:
        """Reads a value up to one of the tags, which stays unread. `on_own_lines`: the line break behind the tag before
        it, and the one before the tag behind it, are no part of it."""
        types = self._types.get(key, frozenset())
        if types == STRING:
            self._begin_argument(key, '"')
            trim = _LineBreaks().push if on_own_lines else str
            found = yield from self.reader.before(ends, lambda text: self.arguments(quoted(trim(text))[1:-1]))
            self.arguments('"' if found else "")
            return
        pieces: list[str] = []
        found = yield from self.reader.before(ends, pieces.append)
        if found:
            value = "".join(pieces)
            value = value.removeprefix("\n").removesuffix("\n") if on_own_lines else value
            self._begin_argument(key, typed_json(value, types))

    def end_arguments(self) -> None:
        self.arguments("}" if self._separator == ", " else "{}")

    def _begin_argument(self, key: str, value: str) -> None:
        self.arguments(f"{self._separator}{quoted(key)}: {value}")
        self._separator = ", "


class _LineBreaks:
    """Drops the first line break of a text that has nothing before it, and the last one that has nothing behind it."""

    def __init__(self) -> None:
        self._started = False
        self._held = ""

    def push(self, text: str) -> str:
        if not self._started:
            self._started = True
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        return text.removesuffix("\n")
