"""Parsers by name, also those of other packages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.tokenizers import (
    ReasoningPart,
    TextPart,
    Tool,
    find_reasoning_parser,
    find_tool_parser,
    reasoning_parser_names,
    tool_parser_names,
)
from support.parsers import Call, Found, found, pushed

ROOT = Path(__file__).parents[3]
MODULE = """
from penstock.tokenizers import OutputStage, ReasoningPart
from penstock.tokenizers.parsing import Tags
from penstock.tokenizers.tool_calls import ToolCallStage


class DollarStage(ToolCallStage):
    '''`$name{...}$`'''

    openings = ("$",)
    closings = ("$",)

    def read_call(self, opening):
        name = yield from self.read_plain_name()
        return name and (yield from self.begin_with_object(name))


class EverythingIsThought(OutputStage):
    markers = ("<deep>",)

    def __init__(self, prompt_end):
        self.prompt_end = prompt_end

    def push(self, text):
        return (ReasoningPart(self.prompt_end + text),)


nothing = 3
"""
ENTRY_POINTS = """
[penstock.tool_parsers]
dollar = other_parsers:DollarStage
hermes = other_parsers:DollarStage
broken = no_such_module:Stage
number = other_parsers:nothing

[penstock.reasoning_parsers]
deep = other_parsers:EverythingIsThought
"""


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "other_parsers-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-parsers\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "other_parsers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("_installed")
def test_other_packages_bring_parsers() -> None:
    assert {"dollar", "hermes", "broken"} <= set(tool_parser_names())
    stage = find_tool_parser("dollar")([Tool("f")])()
    assert found(pushed(stage, 'a $f{"b": 1}$')) == Found("a ", [Call("f", '{"b": 1}')])
    assert "deep" in reasoning_parser_names()
    deep = find_reasoning_parser("deep")
    assert deep.markers == ("<deep>",)
    assert found(pushed(deep("prompt ")(), ["x"])) == Found(reasoning="prompt x")


@pytest.mark.usefixtures("_installed")
def test_names_that_ship_with_penstock_are_ours() -> None:
    assert find_tool_parser("hermes").markers == ("<tool_call>", "</tool_call>")


@pytest.mark.usefixtures("_installed")
def test_what_cannot_be_used_is_told_by_name() -> None:
    with pytest.raises(ValueError, match="tool parser 'broken' cannot be imported"):
        find_tool_parser("broken")
    with pytest.raises(ValueError, match=r"'number' of penstock\.tool_parsers is not a class of OutputStage"):
        find_tool_parser("number")


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no tool parser is called 'qwen'; there are deepseek_v3, .*hermes"):
        find_tool_parser("qwen")
    with pytest.raises(ValueError, match="no reasoning parser is called 'r1'; there are deepseek_r1, "):
        find_reasoning_parser("r1")


def test_each_choice_has_a_stage_of_its_own() -> None:
    make = find_tool_parser("hermes")([])
    first, second = make(), make()
    first.push('<tool_call>{"name": "f"')
    assert found(second.push("text")) == Found("text")


def test_the_documentation_has_every_parser() -> None:
    text = (ROOT / "docs" / "parsers.md").read_text()
    missing = [name for name in (*tool_parser_names(), *reasoning_parser_names()) if f"`{name}`" not in text]
    assert not missing


def test_the_documentation_s_code_runs() -> None:
    names: dict[str, Any] = {"prompt": "..."}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "parsers.md").read_text(), re.DOTALL):
        exec(block, names)  # noqa: S102 (it is ours)
    assert names["parts"] == [ReasoningPart("Hm."), TextPart("Let me"), TextPart(" look.")]
    text = 'a ${x} $weather{"city": "Oslo"}$'
    assert found(pushed(names["DollarStage"](), text)) == Found("a ${x} ", [Call("weather", '{"city": "Oslo"}')])
