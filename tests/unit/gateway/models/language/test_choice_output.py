"""Stages change what a choice's text becomes, not what is counted; stop strings end what is left as text."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import support.tokenizers
from penstock.engines.contract.messages import FinishReason, RequestOutput, TokenLogprobs
from penstock.gateway.models.language.choice_output import ChoiceDelta, ChoiceOutput, StagedChoiceOutput
from penstock.tokenizers import Part, StageChain, StopStrings, TextPart, Tokenizer, ToolCallPart
from support.dataplane import EOS, request
from support.stages import STAGES, joined

pieces = st.sampled_from(["<think>", "</think>", "<tool>", "</tool>", "f:", "{}", "<t", "END", "EN", "x", "ö", "👋🏽"])
texts = st.lists(pieces, max_size=10).map("".join)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer(support.tokenizers.save_folder(folder, support.tokenizers.byte_level()))


def outputs(token_ids: list[int], cuts: list[int], reason: FinishReason) -> list[RequestOutput]:
    """What an engine says of these tokens, cut anywhere into messages."""
    places = [0, *sorted(cut for cut in cuts if cut < len(token_ids)), len(token_ids)]
    cut = [RequestOutput(1, token_ids[start:end]) for start, end in pairwise(places)]
    for output in cut:
        output.logprobs = [TokenLogprobs(token_id, -1.0, 1, []) for token_id in output.token_ids]
    cut[-1].finish_reason = reason
    return cut


def run(choice: ChoiceOutput, tokenizer: Tokenizer, messages: list[RequestOutput]) -> list[ChoiceDelta]:
    deltas: list[ChoiceDelta] = []
    for output in messages:
        deltas.append(choice.advance(output, tokenizer))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


def counted(deltas: list[ChoiceDelta]) -> object:
    return [
        [token_id for delta in deltas for token_id in delta.token_ids],
        [entry.token_id for delta in deltas for entry in delta.logprobs or ()],
        [(delta.finish_reason, delta.stop_reason) for delta in deltas if delta.finish_reason is not None],
    ]


def choice_of(tokenizer: Tokenizer, kind: type[ChoiceOutput], **fields: Any) -> ChoiceOutput:
    wanted = request(stages=STAGES, **fields)
    stops = StopStrings(wanted.stop, wanted.include_stop_str_in_output) if wanted.stop else None
    return kind(0, tokenizer, wanted, [], stops)


def parts_of(deltas: list[ChoiceDelta]) -> list[Part]:
    return joined([part for delta in deltas for part in delta.parts or ()])


def without_stops(text: str) -> list[Part]:
    chain = StageChain(STAGES)
    return joined([*(chain.push(text) if text else ()), *chain.flush()])


def searched(parts: list[Part], stops: tuple[str, ...], *, include: bool) -> tuple[list[Part], str | None]:
    """What a stop string leaves: in each text by itself, the one that begins first, and of those the shortest."""
    for number, part in enumerate(parts):
        text = part.text if isinstance(part, TextPart) else ""
        found = min(((text.find(stop), len(stop), stop) for stop in stops if stop in text), default=None)
        if found is not None:
            kept = text[: found[0]] + (found[2] if include else "")
            return [*parts[:number], *([TextPart(kept)] if kept else [])], found[2]
    return parts, None


@given(
    text=texts,
    cuts=st.lists(st.integers(0, 60), max_size=8),
    stop=st.sampled_from([(), ("x",), ("END", "xf"), ("</tool>", "k>x"), ("xx", "EN", "f:", "{}", "NDxEN")]),
    include=st.booleans(),
    reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
@example(text="E<tool>f:{}</tool>ND", cuts=[], stop=("END",), include=False, reason=FinishReason.LENGTH)
@example(text="NDxEN<tool>f:x</tool>", cuts=[3], stop=("NDxENQ", "xE"), include=False, reason=FinishReason.LENGTH)
def test_parts_are_those_of_the_whole_text_up_to_a_stop_string(
    tokenizer: Tokenizer, text: str, cuts: list[int], stop: tuple[str, ...], include: bool, reason: FinishReason
) -> None:
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    wanted: Any = {"stop": stop, "include_stop_str_in_output": include}
    one_by_one = [*range(len(token_ids))]
    plain = run(choice_of(tokenizer, ChoiceOutput, **wanted | {"stop": ()}), tokenizer, outputs(token_ids, [], reason))
    single = run(choice_of(tokenizer, StagedChoiceOutput, **wanted), tokenizer, outputs(token_ids, one_by_one, reason))
    staged = run(choice_of(tokenizer, StagedChoiceOutput, **wanted), tokenizer, outputs(token_ids, cuts, reason))
    parts, matched = searched(without_stops("".join(delta.text for delta in plain)), stop, include=include)
    assert (parts_of(staged), staged[-1].stop_reason) == (parts, matched)
    assert [delta.text for delta in staged] == [
        "".join(part.text for part in delta.parts or () if isinstance(part, TextPart)) for delta in staged
    ]
    assert counted(staged) == counted(single)
    if matched is None:
        assert counted(staged) == counted(plain)
    else:
        assert staged[-1].finish_reason == "stop"


def test_text_that_may_become_a_stop_string_goes_out_before_a_call(tokenizer: Tokenizer) -> None:
    choice = choice_of(tokenizer, StagedChoiceOutput, stop=("END",))
    shown = [
        choice.advance(RequestOutput(1, tokenizer.encode(text, add_special_tokens=False)), tokenizer).parts
        for text in ("xE", "N", "<tool>f:", "END", "</tool>E")
    ]
    assert shown == [
        [TextPart("x")],
        [],
        [TextPart("EN"), ToolCallPart(0, "", "f")],
        [ToolCallPart(0, part) for part in "END"],
        [],
    ]
    last = choice.advance(RequestOutput(1, [], FinishReason.LENGTH), tokenizer)
    assert (last.parts, last.text, last.finish_reason, last.stop_reason) == ([TextPart("E")], "E", "length", None)


def test_a_stop_string_before_a_call_ends_the_answer_without_it(tokenizer: Tokenizer) -> None:
    """It is complete, but a longer one that begins earlier would win until the text ends."""
    choice = choice_of(tokenizer, StagedChoiceOutput, stop=("xEND", "EN"))
    output = RequestOutput(1, tokenizer.encode("xEN<tool>f:{}</tool>", add_special_tokens=False))
    delta = choice.advance(output, tokenizer)
    assert (delta.parts, delta.finish_reason, delta.stop_reason) == ([TextPart("x")], "stop", "EN")
    assert len(delta.token_ids) < len(output.token_ids)


def test_text_of_the_first_min_tokens_is_shown_and_not_searched(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("END<think>END</think>ENDxEND", add_special_tokens=False)
    early = len(tokenizer.encode("END<think>END</think>END", add_special_tokens=False))
    for min_tokens, text in ((early, "ENDENDx"), (early - 1, "ENDENDx"), (2, "END"), (0, "")):
        choice = choice_of(tokenizer, StagedChoiceOutput, stop=("END",), params={"min_tokens": min_tokens})
        deltas = run(choice, tokenizer, outputs(token_ids, [2, 5], FinishReason.LENGTH))
        assert "".join(delta.text for delta in deltas) == text, min_tokens
        assert deltas[-1].stop_reason == "END"
