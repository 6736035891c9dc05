from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.tokenizers import Part, ReasoningPart, StageChain, TextPart, ToolCallPart
from support.stages import STAGES, ThinkStage, ToolStage, joined

pieces = st.sampled_from(
    ["<think>", "</think>", "<tool>", "</tool>", "f:", "g:{}", '{"a": 1}', "<", ">", "</", "t", "think>", "ö"]
)


def run(texts: list[str]) -> list[Part]:
    chain = StageChain(STAGES)
    return [*(part for text in texts if text for part in chain.push(text)), *chain.flush()]


def oracle(text: str) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, text, calls), found in the whole text by regular expressions."""
    thoughts: list[str] = []
    calls: list[tuple[str, str]] = []

    def thought(match: re.Match[str]) -> str:
        thoughts.append(match[1])
        return ""

    def call(match: re.Match[str]) -> str:
        name, colon, arguments = match[1].partition(":")
        if not colon:
            return match[0]
        calls.append((name, arguments))
        return ""

    rest = re.sub(r"<think>(.*?)(?:</think>|$)", thought, text)
    return "".join(thoughts), re.sub(r"<tool>(.*?)(?:</tool>|$)", call, rest), calls


def by_kind(parts: list[Part]) -> tuple[str, str, list[tuple[str, str]]]:
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, ToolCallPart):
            if part.name is not None:
                assert part.index == len(calls)
                calls.append((part.name, ""))
            name, arguments = calls[part.index]
            calls[part.index] = (name, arguments + part.arguments)
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    return reasoning, "".join(part.text for part in parts if isinstance(part, TextPart)), calls


@given(text=st.lists(pieces, max_size=10).map("".join), cuts=st.lists(st.integers(0, 80), max_size=8))
@example(text="<tool>f:{}</tool><tool>g:{}</tool>", cuts=list(range(40)))
@example(text="a<thi<think>b</think>nk>c</tool", cuts=[3])
@example(text="<think>a</thi", cuts=[])
@example(text="<tool>a</t", cuts=[8])
def test_parts_do_not_depend_on_how_the_text_is_cut(text: str, cuts: list[int]) -> None:
    cut = run([text[start:end] for start, end in pairwise([0, *sorted(cuts), len(text)])])
    assert joined(cut) == joined(run([text]))
    assert by_kind(cut) == oracle(text)


def test_stages_see_what_the_ones_before_have_left_as_text() -> None:
    text = "<think>a<tool>f:1</tool></think>b"
    assert StageChain([ThinkStage, ToolStage]).push(text) == [ReasoningPart("a<tool>f:1</tool>"), TextPart("b")]
    calls_first = StageChain([ToolStage, ThinkStage]).push(text)
    assert calls_first == [ReasoningPart("a"), ToolCallPart(0, "1", "f"), TextPart("b")]


def test_what_a_stage_held_back_goes_through_those_behind_it() -> None:
    chain = StageChain([ThinkStage, ToolStage])
    assert list(chain.push("<tool>f:1</")) == [ToolCallPart(0, "1", "f")]
    assert list(chain.flush()) == [ToolCallPart(0, "</")]
