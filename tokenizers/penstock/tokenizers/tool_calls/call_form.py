"""How a format writes calls, for grammars that make a model write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .. import lark
from .tool import Tool

_MOST_CALLS = 32
"""In one answer: a model that repeats itself ends at some point."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """Calls whose arguments are JSON: `begin`, then for each call `before`, its name, `behind_name`, its arguments and
    `behind`; `between` two of them, and `end`. Special tokens may be part of all these."""

    before: str
    behind_name: str
    behind: str
    between: str
    begin: str = ""
    end: str = ""

    def calls(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> str:
        """A grammar for nothing but calls of these tools."""
        return f"start: calls\n{self._rules(tools, special_ids, parallel=parallel)}"

    def calls_or(self, answer: str, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> str:
        """A grammar for nothing but calls of these tools, or `answer`, which is Lark, too."""
        return f"start: calls | answer\nanswer: {answer}\n{self._rules(tools, special_ids, parallel=parallel)}"

    def calls_or_text(self, tools: Sequence[Tool], special_ids: Mapping[str, int], *, parallel: bool) -> str:
        """A grammar for any text, in which what begins like a call is one of these tools.

        Where calls have no tag of their own, they are all of an answer or none of it.
        """
        opening = self.begin + self.before
        first, *rest = lark.split(opening, special_ids)
        if first in special_ids:
            tagged = f"TEXT {lark.literal(opening, special_ids)}"
            text = r"TEXT: /(.|\n)*/"
        elif not first.startswith(("{", "[")):
            tag = first.split("\n", 1)[0]
            behind = first[len(tag) :] + "".join(rest)
            tagged = f"tag {lark.literal(behind, special_ids)}"
            text = f"tag[lazy]: {lark.regex(lark.up_to(tag))}\n" + r"TEXT: /(.|\n)*/"
        else:
            rules = self._rules(tools, special_ids, parallel=parallel)
            return f"start: calls | TEXT\nTEXT: /[^{{\\[](.|\\n)*/\n{rules}"
        # The first call has its opening from the text before it.
        rules = self._rules(tools, special_ids, parallel=parallel, opened=True)
        start = f"({tagged} calls)* TEXT" if parallel else f"{tagged} calls | TEXT"
        return f"start: {start}\n{text}\n{rules}"

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
            head = json.dumps(tool.name) + self.behind_name
            rules.append(f"{name}: {literal(head)} {arguments} {literal(self.behind)}")
        return "\n".join(rules)


def object_form(arguments: str, *, before: str, behind: str, between: str, begin: str = "", end: str = "") -> CallForm:
    """Calls as JSON objects; `arguments` is the key of theirs."""
    return CallForm(
        before=before + '{"name": ',
        behind_name=f', "{arguments}": ',
        behind="}" + behind,
        between=between,
        begin=begin,
        end=end,
    )
