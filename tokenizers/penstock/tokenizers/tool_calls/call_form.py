"""The forms in which models write tool calls, as grammars that make a model write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from .. import lark


class Tool(msgspec.Struct, frozen=True):
    """One that the model may call."""

    name: str
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments, as the client wrote it."""
    strict: bool = False
    """Arguments follow the schema in any case."""


_MOST_CALLS = 32
"""In one answer: a model that repeats itself ends at some point."""
_ANY = r"(.|\n)*"
_NO_JSON = r"[ \t\r\n]*([^{\[ \t\r\n](.|\n)*)?"
"""Text that is not, by its beginning, an object or a list."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """Calls whose arguments are JSON: `begin`, then for each call `before`, its name, `behind_name`, its arguments and
    `behind`; `between` two of them, and `end`. Special tokens may be part of all these.

    `tags`: in a text, each of these begins calls, as the parser sees it. `begin` and `before` start with one of them if
    calls need a tag. A tag is either a special token or free of them.
    """

    before: str
    behind_name: str
    behind: str
    between: str
    begin: str = ""
    end: str = ""
    tags: tuple[str, ...] = ()

    def calls(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> str:
        """A grammar for nothing but calls of these tools."""
        return f"start: calls\n{self._rules(tools, special_ids, parallel=parallel)}"

    def calls_or(self, answer: str, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> str:
        """A grammar for nothing but calls of these tools, or `answer`, which is Lark, too."""
        return f"start: calls | answer\nanswer: {answer}\n{self._rules(tools, special_ids, parallel=parallel)}"

    def calls_or_text(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> str:
        """A grammar for any text, in which what begins like a call is one of these tools.

        Where calls need no tag, they are all of an answer, or all that stands behind a tag.
        """
        opening = self.begin + self.before
        own = next((tag for tag in self.tags if opening.startswith(tag)), "")
        text = _ANY if own else _NO_JSON
        tagged = [f"TEXT {lark.literal(tag, special_ids)}" for tag in self.tags if tag in special_ids]
        terminals = [f"TEXT: {lark.regex(text)}"]
        if self.tags:  # spelled, a special token is a tag as well
            tagged.append("tag")
            terminals.append(f"tag[lazy]: {lark.regex(text + '(' + '|'.join(map(re.escape, self.tags)) + ')')}")
        calls = f"({' | '.join(tagged)}){'' if own else '?'} {lark.literal(opening[len(own) :], special_ids)} calls"
        start = f"({calls})* TEXT" if own and parallel else f"{calls} | TEXT"
        # The calls' opening stands before them already.
        rules = self._rules(tools, special_ids, parallel=parallel, opened=True)
        return "\n".join((f"start: {start}", *terminals, rules))

    def _rules(
        self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool, opened: bool = False
    ) -> str:
        def literal(text: str) -> str:
            return lark.literal(text, special_ids)

        names = [f"call_{number}" for number in range(len(tools))]
        more = f"({literal(self.between + self.before)} call){{0,{_MOST_CALLS - 1}}}" if parallel else ""
        opening = "" if opened else literal(self.begin + self.before)
        rules = [f"calls: {opening} call {more} {literal(self.end)}", f"call: {' | '.join(names)}"]
        for name, tool in zip(names, tools, strict=True):
            arguments = lark.json_value(tool.parameters or {"type": "object"}, lenient=not tool.strict)
            head = json.dumps(tool.name, ensure_ascii=False) + self.behind_name
            rules.append(f"{name}: {literal(head)} {arguments} {literal(self.behind)}")
        return "\n".join(rules)


def object_form(
    arguments: str,
    *,
    tags: tuple[str, ...],
    before: str,
    behind: str,
    between: str,
    begin: str = "",
    end: str = "",
) -> CallForm:
    """Calls as JSON objects; `arguments` is the key of theirs."""
    return CallForm(
        before=before + '{"name": ',
        behind_name=f', "{arguments}": ',
        behind="}" + behind,
        between=between,
        begin=begin,
        end=end,
        tags=tags,
    )
