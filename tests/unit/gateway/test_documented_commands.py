"""The commands that README, docs and examples show: their flags exist, and take the values that are shown."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from penstock.gateway import cli
from penstock.gateway.configuration.config import load_config

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/**/README.md"))]
PARSER = cli._parser()


def commands(page: str) -> Iterator[list[str]]:
    """Arguments of each `penstock` in blocks of shell commands."""
    for block in re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        variables: dict[str, str] = {}
        for line in lines(block):
            reader = shlex.shlex(line, posix=True, punctuation_chars=True)
            reader.whitespace_split = True
            for operator, words in itertools.groupby(reader, lambda word: not set(word) - set("|&;<>()")):
                program, *arguments = list(expanded(words, variables)) or [""]
                if not operator and (program == "penstock" or program.endswith("/penstock")):
                    yield arguments


def lines(block: str) -> Iterator[str]:
    """As a shell takes them: one goes on behind a backslash, and inside quotes."""
    line = ""
    for part in block.splitlines():
        line += part
        if line.endswith("\\"):
            line = line[:-1]
            continue
        try:
            shlex.split(line, comments=True)
        except ValueError:
            line += "\n"
            continue
        yield line
        line = ""
    assert not line, "a quote is open"


def expanded(words: Iterable[str], variables: dict[str, str]) -> Iterator[str]:
    """With the values of variables that the block has set; as a flag's value they are one word."""
    last = ""
    for word in words:
        if assignment := re.fullmatch(r"([A-Z_]+)=(.*)", word, re.DOTALL):
            variables[assignment[1]] = assignment[2]
        elif word[1:] in variables and word[0] == "$":
            yield from [variables[word[1:]]] if last.startswith("--") else variables[word[1:]].split()
        else:
            yield word
        last = word


def parse(arguments: list[str]) -> None:
    settings = vars(PARSER.parse_args(arguments))
    if arguments[0] == "serve":
        load_config({name: settings[name] for name in settings.keys() - {"run_command", "config"}}, environ={})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_its_commands_are_commands(page: Path) -> None:
    for arguments in commands(page.read_text()):
        parse(arguments)


def test_commands_are_read_as_a_shell_does() -> None:
    page = (
        "```sh\nA=1 .venv/bin/penstock serve \\\n  --host '::1' && penstock chat > file # penstock none\n"
        "X='--a b'\nARGS='{\"a\":\n 1}'\npenstock serve $X --engine-args \"$ARGS\" | cat penstock\n```\n"
    )
    assert list(commands(page)) == [
        ["serve", "--host", "::1"],
        ["chat"],
        ["serve", "--a", "b", "--engine-args", '{"a":\n 1}'],
    ]
    assert sum(len(list(commands(each.read_text()))) for each in PAGES) > 50


@pytest.mark.parametrize("line", ["serve --no-such-flag", "serve --weights int3", "chat --urll x", "nothing"])
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises((AssertionError, SystemExit, ValueError)):
        parse(shlex.split(line))
