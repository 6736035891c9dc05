"""The parser of a command: it says in one or two lines what is wrong, and which flag was probably meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
"""What argparse takes for a value and not for a flag."""
_HEAD = re.compile(r"[a-z][a-z0-9_-]*(?=: )")
_ASSIGNED = re.compile(r"(?<![\w./'\"`=,-])([a-z][a-z0-9_]*)=([^\s,;:)]+)")
_WORD = re.compile(r"(?<![\w./'\"`=-])[a-z]+(?:[_-][a-z0-9]+)+(?!\.\w|[\w/='\"`-])")
_TABLES = ("upstream", "traffic", "ray")
"""Settings that are tables, whose fields may have the names of other settings."""


class CommandParser(argparse.ArgumentParser):
    """Parsers of its subcommands are of this class, too. Flags are never abbreviated."""

    def __init__(
        self,
        *,
        fill: Callable[[argparse.ArgumentParser], None] | None = None,
        prepare: Callable[[CommandParser, Sequence[str]], Sequence[str]] | None = None,
        hints: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """`fill` adds the flags when the command is used, for those that take too long to make for every command.
        `prepare` may change the arguments before they are read. `hints`: what to use in place of flags, or commands,
        that other programs have."""
        super().__init__(allow_abbrev=False, **options)
        self._fill = fill
        self._prepare = prepare
        self._hints = hints or {}
        self._args: Sequence[str] = ()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """There is never anything unknown: that ends the program."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill(self)
        args = self._args = args or ()
        if self._prepare is not None:
            args = self._prepare(self, args)
        unknown = next(self._unknown(args), None)  # before others: what follows it may look like a positional
        if unknown is not None:
            self._refuse(unknown)
        self._check_command(args)
        values, rest = super().parse_known_args(args, namespace)
        if rest:
            self._refuse(rest[0])
        return values, []

    @property
    def flags(self) -> list[str]:
        return list(self._option_string_actions)

    def _unknown(self, args: Iterable[str]) -> Iterator[str]:
        """Flags that there are not, as far as this parser reads."""
        for arg in args:
            flag = arg.partition("=")[0]
            is_flag = len(arg) > 1 and arg.startswith("-") and " " not in flag and not _NUMBER.fullmatch(arg)
            if arg == "--" or (not is_flag and self._subparsers is not None):
                return
            if is_flag and flag not in self._option_string_actions and not self._is_short(arg):
                yield arg

    def _is_short(self, arg: str) -> bool:
        """A flag of one letter with its value, or others, behind it."""
        return not arg.startswith("--") and arg[:2] in self._option_string_actions and arg not in self._hints

    def _check_command(self, args: Iterable[str]) -> None:
        """argparse would list all that there are."""
        command = next((arg for arg in args if not arg.startswith("-")), None)
        if command is None or not self.commands or command in self.commands:
            return
        near = get_close_matches(command, self.commands, 1)
        hint = self._hints.get(command) or (f"did you mean {self.prog} {near[0]}?" if near else self._choices)
        self.fail(f"there is no command {command!r}", hint)

    @property
    def commands(self) -> Sequence[str]:
        """Where one of them is needed."""
        groups = [
            action for action in self._actions if isinstance(action, argparse._SubParsersAction) and action.required
        ]
        return [name for group in groups for name in group.choices]

    @property
    def _choices(self) -> str:
        return f"one of: {', '.join(self.commands)}" if self.commands else ""

    def _refuse(self, arg: str) -> NoReturn:
        """An argument that there is not: what was probably meant. Its value is not shown: it may be a key."""
        flag = arg.partition("=")[0]
        if not flag.startswith("-"):
            self.fail(f"unexpected argument {arg!r}", self._see_help)
        self.fail(f"there is no flag {flag}", self._hint(flag) or self._see_help)

    def _hint(self, flag: str) -> str:
        flag = flag.replace("_", "-")
        if flag in self.flags:
            return f"did you mean {flag}?"
        hints = {name: hint for name, hint in self._hints.items() if self._has(flags_in(hint))}
        longer = [candidate for candidate in self.flags if flag.startswith("--") and candidate.startswith(flag)]
        near = longer[:3] or _near(flag, [*self.flags, *hints])
        if flag in hints or (near and near[0] in hints):
            return hints[flag if flag in hints else near[0]]
        if longer:
            return f"write it in full: {' or '.join(near)}"
        return f"did you mean {' or '.join(candidate for candidate in near if candidate not in hints)}?" if near else ""

    def _has(self, flags: Collection[str]) -> bool:
        return all(flag in self._option_string_actions for flag in flags)

    @property
    def _see_help(self) -> str:
        return f"`{self.prog} --help` shows what there is"

    def error(self, message: str) -> NoReturn:
        message = as_flags(self._one_name(message), [flag.lstrip("-") for flag in self.flags])
        missing = message.startswith("the following arguments are required")
        self.fail(message, (self._choices or self._see_help) if missing else "")

    def _one_name(self, message: str) -> str:
        """argparse names all names of a flag, "argument -i/--input-file: ...": only the one that was written."""
        start, head, rest = message.partition("argument ")
        names, colon, problem = rest.partition(": ")
        if start or not head or not names.startswith("-"):
            return message.removeprefix("argument ")
        written = {arg.partition("=")[0] for arg in self._args}
        aliases = names.split("/")
        return next((name for name in aliases if name in written), aliases[-1]) + colon + problem

    def fail(self, message: str, hint: str = "") -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n" + (f"{hint}\n" if hint else ""))


def _near(flag: str, flags: Iterable[str]) -> list[str]:
    """The long flags that are spelled almost like it."""
    names = {candidate.removeprefix("--"): candidate for candidate in flags if candidate.startswith("--")}
    name = flag.lstrip("-")
    return [
        names[candidate] for candidate in get_close_matches(name, names, 2, 0.8) or get_close_matches(name, names, 1)
    ]


def flags_in(hint: str) -> list[str]:
    """Those that a hint names."""
    return re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", hint)


def as_flags(message: str, names: Collection[str]) -> str:
    """A message about settings for a person at the command line: `max_model_len=8192 is above ...` becomes
    `--max-model-len 8192 is above ...`. Only its first line: others list what files and models say.

    `names`: of the settings that have flags.
    """
    known = {name.replace("-", "_") for name in names}
    first, newline, rest = message.partition("\n")
    first = first.removeprefix("model: ")

    def flag(name: str) -> str:
        return "--" + name.replace("_", "-") if name.replace("-", "_") in known else name

    def assigned(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        if name not in known:
            return match[0]
        off = value.lower() == "false"
        return f"--{'no-' * off}{flag(name)[2:]}" if off or value.lower() == "true" else f"{flag(name)} {value}"

    head = _HEAD.match(first)
    start = head.end() if head is not None else 0
    if head is None or head[0] not in _TABLES:
        first = first[:start] + _WORD.sub(lambda match: flag(match[0]), _ASSIGNED.sub(assigned, first[start:]))
    return flag(first[:start]) + first[start:] + newline + rest if start else first + newline + rest
