"""Thoughts that are too long: what is written for the model, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from penstock.tokenizers import ThoughtTags, Tokenizer, find_reasoning_parser, reasoning_parser_names
from penstock.tokenizers.grammars import GrammarCompiler, TokenMatcher
from penstock.tokenizers.reasoning.thoughts import GptOssReasoningStage
from support.grammars import allowed_next
from support.models import make_tokenizer

HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"]
SPELLED = ThoughtTags(("<think>",), ("</think>", "<tool_call>"), "</think>")
INSIDE = SPELLED._replace(inside=True)
AGAIN = SPELLED._replace(again=True)
SPECIAL = ThoughtTags(("<t>",), ("</t>",), "</t>")


class Writer:
    """Writes what a model would write, as far as it is let."""

    def __init__(self, folder: Path) -> None:
        made = make_tokenizer()
        made.add_tokens([*SPECIAL.openings, *SPECIAL.endings, *HARMONY], special_tokens=True)
        made.save_pretrained(folder)
        self.tokenizer = Tokenizer(folder)
        self.size = self.tokenizer.vocab_size
        self._compiler = GrammarCompiler(folder, self.size, [2])

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def write(
        self, tags: ThoughtTags, budget: int, text: str, kind: str = "text", grammar: str = "", cut: int = 0
    ) -> str:
        """What stands there when the model has said all of its text. Where a token is not allowed, it writes the one
        that is, and then goes on. After `cut` tokens the output is taken up by another matcher."""
        thought = ("" if tags.inside else tags.openings[0], tags.closing) if kind != "text" else None
        compiled = self._compiler.compile(kind, grammar, thought, "", (tags, budget))
        matcher, written = compiled.start(), list[int]()
        wanted = self.ids(text)
        while wanted:
            [bits] = allowed_next([matcher], self.size)
            assert not matcher.is_free or bits.all()
            allowed = set(np.flatnonzero(bits).tolist())
            if wanted[0] not in allowed:
                assert len(allowed) == 1, self.tokenizer.decode(written)
            token = wanted.pop(0) if wanted[0] in allowed else next(iter(allowed))
            written.append(token)
            matcher.consume([token])
            assert not matcher.problem
            if len(written) == cut:
                matcher = compiled.start(written)
        return self.tokenizer.decode(written, skip_special_tokens=False)


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Writer:
    return Writer(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("tags", "budget", "text", "becomes"),
    [
        (SPELLED, 5, "<think>abcde", "<think>abcde"),
        (SPELLED, 5, "<think>abcdefg", "<think>abcde</think>fg"),
        (SPELLED, 5, "  \n<think>abcdefg", "  \n<think>abcde</think>fg"),
        (SPELLED, 0, "<think>ab", "<think></think>ab"),
        (SPELLED, 20, "<think>abc</think>" + "x" * 40, "<think>abc</think>" + "x" * 40),
        (SPELLED, 20, "<think>a<tool_call>" + "x" * 40, "<think>a<tool_call>" + "x" * 40),
        (SPELLED, 3, "an answer, <think>and this is text", "an answer, <think>and this is text"),
        (SPELLED, 3, "<thinking>is no tag", "<thinking>is no tag"),
        (SPELLED, 3, "<think>a</zz", "<think>a</</think>zz"),
        (INSIDE, 3, "abcdef", "abc</think>def"),
        (INSIDE, 0, "abcdef", "</think>abcdef"),
        (INSIDE, 12, "abc</think>" + "x" * 40, "abc</think>" + "x" * 40),
        (INSIDE, 2, "añb", "añ</think>b"),
        (INSIDE, 2, "a🙂b", "a🙂</think>b"),
        (AGAIN, 12, "x<think>a</think>y<think>bcdefg", "x<think>a</think>y<think>bcd</think>efg"),
        (SPECIAL, 3, "<t>abcdef", "<t>abc</t>def"),
        (SPECIAL, 9, "<t>abcdef</t>abcdefghijk", "<t>abcdef</t>abcdefghijk"),
        (SPECIAL, 3, "abcdef<t>abcdef", "abcdef<t>abcdef"),
    ],
)
def test_the_end_of_a_thought(writer: Writer, tags: ThoughtTags, budget: int, text: str, becomes: str) -> None:
    assert writer.write(tags, budget, text) == becomes
    for cut in range(1, 12):
        assert writer.write(tags, budget, text, cut=cut) == becomes


def test_bytes_of_which_no_character_is_made_end_as_well(writer: Writer) -> None:
    """Each could be the first of two."""
    first = writer.ids("ñ")[0]
    compiled = writer._compiler.compile("text", "", budget=(INSIDE, 2))
    assert compiled.start([first] * 4).is_free
    [allowed] = allowed_next([compiled.start([first] * 5)], writer.size)
    assert np.flatnonzero(allowed).tolist() == writer.ids("<")


def test_a_grammar_behind_it(writer: Writer) -> None:
    for tags, text, becomes in (
        (INSIDE, "abcyes", "abc</think>yes"),
        (SPELLED, "<think>abcyes", "<think>abc</think>yes"),
        (SPECIAL, "<t>abcyes", "<t>abc</t>yes"),
        (SPECIAL, "no", "no"),
    ):
        written = writer.write(tags, 3, text, "choice", '["yes", "no"]')
        assert written == becomes


def test_gpt_oss_does_not_think_again(writer: Writer) -> None:
    frame = GptOssReasoningStage.frame("")
    tags = frame.thought_tags
    assert tags is not None
    with_answer = tags._replace(closing=tags.closing + frame.preface)
    thought = "<|channel|>analysis<|message|>"
    assert writer.write(with_answer, 3, thought + "abcdef") == f"{thought}abc{tags.closing}{frame.preface}def"
    start = f"{thought}abc{tags.closing}<|channel|>"
    [allowed] = allowed_next([_after(writer, tags, 3, start)], writer.size)
    assert np.flatnonzero(~allowed).tolist() == writer.ids("a")
    early = f"{thought}a<|end|><|start|>assistant<|channel|>"
    assert _after(writer, tags, 3, early).is_free


def _after(writer: Writer, tags: ThoughtTags, budget: int, text: str) -> TokenMatcher:
    return writer._compiler.compile("text", "", budget=(tags, budget)).start(writer.ids(text))


@pytest.mark.parametrize("name", reasoning_parser_names())
def test_the_parsers_see_the_end(writer: Writer, name: str) -> None:
    """What is written for the model is what its parser takes for the end of the thought."""
    parser = find_reasoning_parser(name)
    assert parser.frame is not None
    frame = parser.frame("")
    tags = frame.thought_tags
    assert tags is not None
    tags = tags._replace(closing=tags.closing + frame.preface)
    begin = "" if tags.inside else tags.openings[0]
    written = writer.write(tags, 4, begin + "1111222")
    assert written == f"{begin}1111{tags.closing}222"
    assert _joined(parser(""), written) == ("1111", "222")


def _joined(factory: Callable[[], object], text: str) -> Sequence[str]:
    from penstock.tokenizers import ReasoningPart, StageChain, TextPart

    chain = StageChain([factory])  # type: ignore[list-item]
    parts = [*chain.push(text), *chain.flush()]
    return tuple("".join(part.text for part in parts if isinstance(part, kind)) for kind in (ReasoningPart, TextPart))
