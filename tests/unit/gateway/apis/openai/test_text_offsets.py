"""`text_offset` of text completions: the answer's text from there on begins with the token's text."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.engines.contract.messages import FinishReason, RequestOutput, TokenLogprobs
from penstock.gateway.apis.openai.completions import Echo
from penstock.gateway.models.language.choice_output import ChoiceDelta, ChoiceOutput, TokenLogprob, with_text
from penstock.gateway.models.language.generation import Generation
from penstock.tokenizers import StopStrings, Tokenizer
from support.dataplane import request
from support.tokenizers import KINDS, build, save_folder

# Characters of one to four bytes, of which most tokenizers have no token; the same line end twice.
PIECES = ["the ", "x", "\n", "END", "E", "EN", "ö", "€", "👋🏽", "好", "Q", "<|im_start|>"]
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=10).map("".join)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {kind: Tokenizer(save_folder(tmp_path_factory.mktemp(kind), build(kind))) for kind in KINDS}


def stream(
    tokenizer: Tokenizer, token_ids: list[int], cuts: list[int], stop: tuple[str, ...], *, include: bool
) -> list[ChoiceDelta]:
    """What a client gets while an engine gives these tokens, cut anywhere into messages."""
    wanted = request(params={"logprobs": 0}, stop=stop, include_stop_str_in_output=include)
    prompt = tokenizer.encode("x", add_special_tokens=False)
    choice = ChoiceOutput(0, tokenizer, wanted, prompt, StopStrings(stop, include) if stop else None)
    places = [0, *sorted(cut for cut in cuts if cut < len(token_ids)), len(token_ids)]
    deltas: list[ChoiceDelta] = []
    for start, end in pairwise(places):
        output = RequestOutput(1, token_ids[start:end], FinishReason.LENGTH if end == len(token_ids) else None)
        output.logprobs = [TokenLogprobs(token_id, -1.0, 1, []) for token_id in output.token_ids]
        deltas.append(choice.advance(output, tokenizer))
        choice.rejoin(deltas[-1])
        if deltas[-1].finish_reason is not None:
            break
    return deltas


@pytest.mark.parametrize("kind", KINDS)
@given(
    text=texts,
    cuts=st.lists(st.integers(0, 40), max_size=8),
    stop=st.sampled_from([(), ("END",), ("x\n", "ENDx")]),
    include=st.booleans(),
)
def test_each_offset_is_where_the_token_s_text_begins(
    tokenizers: dict[str, Tokenizer], kind: str, text: str, cuts: list[int], stop: tuple[str, ...], include: bool
) -> None:
    tokenizer = tokenizers[kind]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = stream(tokenizer, token_ids, cuts, stop, include=include)
    whole = "".join(delta.text for delta in deltas)
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert [entry.token_id for entry in entries] == [token_id for delta in deltas for token_id in delta.token_ids]
    shown, last = "", 0
    for delta in deltas:
        shown += delta.text
        assert len(delta.logprobs or ()) == len(delta.token_ids)
        for entry in delta.logprobs or ():
            assert last <= entry.offset <= len(shown)
            last = entry.offset
            assert begins_with(whole[entry.offset :], entry, tokenizer, is_cut=deltas[-1].stop_reason is not None)


def begins_with(rest: str, entry: TokenLogprob, tokenizer: Tokenizer, *, is_cut: bool) -> bool:
    if entry.token.startswith("bytes:") or tokenizer.is_silent(entry.token_id, skip_special_tokens=True):
        return True  # not a text of its own
    text = entry.token.removeprefix("##")
    return rest.startswith((text, f" {text}")) or (is_cut and text.startswith(rest))


def test_offsets_of_characters_in_several_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    token_ids = tokenizer.encode("\n\n👋👋x", add_special_tokens=False)[1:]
    assert len(token_ids) == 2 + 4 + 4 + 1
    deltas = stream(tokenizer, token_ids, list(range(len(token_ids))), (), include=False)
    offsets = [entry.offset for delta in deltas for entry in delta.logprobs or ()]
    assert offsets == [0, 1, *[2] * 4, *[3] * 4, 4]


def test_a_token_waits_while_a_stop_string_may_cut_it_off(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    token_ids = [token_id for letter in "xENx" for token_id in tokenizer.encode(letter, add_special_tokens=False)]
    deltas = stream(tokenizer, token_ids, [1, 2, 3], ("END",), include=False)
    assert [(delta.text, [entry.offset for entry in delta.logprobs or ()]) for delta in deltas] == [
        ("x", [0]),
        ("", [1]),
        ("", []),
        ("ENx", [2, 3]),
    ]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
@given(text=texts.map(lambda text: f"a{text}"))
@example("aENDENDENDENDthe ")  # one token may stand for all that is unknown
def test_offsets_of_an_echoed_prompt(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    begin = cast(int, tokenizer.id_of("<s>"))
    entries = echoed(tokenizer, text, [begin, *tokenizer.encode(text, add_special_tokens=False)])
    for entry in entries:
        rest = text[len(text) + entry.offset :]
        unknown = entry.token_id in (begin, tokenizer.id_of("<unk>"))
        assert (
            unknown or entry.token.startswith("bytes:") or rest.startswith((entry.token, entry.token.removeprefix(" ")))
        )
    assert entries[0].offset == entries[1].offset == -len(text)


def echoed(tokenizer: Tokenizer, text: str, token_ids: list[int]) -> list[TokenLogprob]:
    known = [with_text(TokenLogprobs(token_id, -1.0, 1, []), tokenizer) for token_id in token_ids]
    generation: Any = SimpleNamespace(
        prompt_token_ids=[token_ids],
        prompt_logprobs=[[None, *known[1:]]],
        first_token=lambda _: (known[0].token, bytes(known[0].bytes)),
    )
    return Echo(cast(Generation, generation), [text], 1).logprobs(0)


def test_a_prompt_that_its_tokenizer_has_normalized(tokenizers: dict[str, Tokenizer]) -> None:
    """Behind what the tokens have otherwise, the places are right again."""
    tokenizer = tokenizers["byte_level"]
    text = "xe\u0301 the the"
    entries = echoed(tokenizer, text, tokenizer.encode("x\u00e9 the the", add_special_tokens=False))
    assert [text[len(text) + entry.offset :] for entry in entries if "the" in entry.token] == [" the the", " the"]
