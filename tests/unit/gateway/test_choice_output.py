"""Stages change what a choice's text becomes, and nothing else: not where it stops, nor what is counted."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import helpers_tokenizers
from helpers_dataplane import EOS, request
from helpers_stages import STAGES, joined
from penstock.engines.contract.messages import FinishReason, RequestOutput, TokenLogprobs
from penstock.gateway.llm.choice_output import ChoiceDelta, ChoiceOutput, StagedChoiceOutput
from penstock.tokenizers import StageChain, TextPart, Tokenizer

pieces = st.sampled_from(["<think>", "</think>", "<tool>", "</tool>", "f:", "{}", "<t", "END", "EN", "x", "ö", "👋🏽"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer(helpers_tokenizers.save_folder(folder, helpers_tokenizers.byte_level()))


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


@given(
    text=st.lists(pieces, max_size=10).map("".join),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    stop=st.sampled_from([(), ("END",), ("</tool>", "k>x")]),
    include=st.booleans(),
    reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_parts_are_those_of_the_whole_text(
    tokenizer: Tokenizer, text: str, cuts: list[int], stop: tuple[str, ...], include: bool, reason: FinishReason
) -> None:
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    wanted = request(stop=stop, include_stop_str_in_output=include, stages=STAGES)
    plain = run(ChoiceOutput(0, tokenizer, wanted, []), tokenizer, outputs(token_ids, cuts, reason))
    staged = run(StagedChoiceOutput(0, tokenizer, wanted, []), tokenizer, outputs(token_ids, cuts, reason))
    chain = StageChain(STAGES)
    whole = "".join(delta.text for delta in plain)
    parts = [part for delta in staged for part in delta.parts or ()]
    assert joined(parts) == joined([*(chain.push(whole) if whole else ()), *chain.flush()])
    assert [delta.text for delta in staged] == [
        "".join(part.text for part in delta.parts or () if isinstance(part, TextPart)) for delta in staged
    ]
    assert counted(staged) == counted(plain)
