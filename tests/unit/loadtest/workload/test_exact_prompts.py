"""Prompts of exactly as many tokens as were asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import fmean, pstdev

import pytest
from tokenizers import Tokenizer, normalizers

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.workload.vocabulary import FittedWords, Vocabulary, load_vocabulary
from support.workload import (
    DEMO,
    calls,
    demo,
    demo_with_bos,
    doubled_letters,
    joining,
    letters,
    rarely_joining,
    saved,
    word_pieces,
    write,
)


def encoded(path: str, text: object) -> list[int]:
    """As a server does it: with what its tokenizer adds, and without limits."""
    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return list(tokenizer.encode(text).ids)


@pytest.mark.parametrize("make", [demo, demo_with_bos, joining, rarely_joining, letters, word_pieces])
@pytest.mark.parametrize("tokens", [2, 3, 17, 128, 700])
def test_text_has_exactly_the_tokens(make: Callable[[], Tokenizer], tokens: int, tmp_path: Path) -> None:
    path = saved(make(), tmp_path)
    for call in calls(tokenizer=path, requests=6, prompt_tokens=tokens):
        assert len(encoded(path, call.prompt)) == tokens == call.prompt_tokens


@pytest.mark.parametrize("make", [demo, joining, letters])
def test_a_shared_prefix_comes_on_top(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    path = saved(make(), tmp_path)
    sent = calls(tokenizer=path, requests=12, prompt_tokens=40, shared_prefix_tokens=60, prefixes=3)
    assert {len(encoded(path, call.prompt)) for call in sent} == {100} == {call.prompt_tokens for call in sent}
    assert len({tuple(encoded(path, call.prompt)[:50]) for call in sent}) == 3
    assert len({tuple(encoded(path, call.prompt)[:64]) for call in sent}) == 12


def test_what_the_tokenizer_adds_is_counted_but_in_chats(tmp_path: Path) -> None:
    path = saved(demo_with_bos(), tmp_path)
    (text,) = calls(tokenizer=path, requests=1, prompt_tokens=20)
    (chat,) = calls("openai-chat", tokenizer=path, requests=1, prompt_tokens=20)
    assert (len(encoded(path, text.prompt)), text.prompt_tokens) == (20, 20)
    assert (len(encoded(path, chat.prompt)), chat.prompt_tokens) == (21, None), "the template's tokens are not known"
    (least,) = calls(tokenizer=path, requests=1, prompt_tokens=1)
    assert len(encoded(path, least.prompt)) == least.prompt_tokens == 2


def test_ids_are_ordinary_and_exact() -> None:
    sent = calls(tokenizer=str(DEMO), token_ids=True, requests=50, prompt_tokens=300, shared_prefix_tokens=5)
    assert all(isinstance(call.prompt, list) and len(call.prompt) == 305 == call.prompt_tokens for call in sent)
    used = {token for call in sent for token in call.prompt}
    assert min(used) >= 3, "a special token"
    assert max(used) < 4096
    assert len(used) > 3000
    assert len({tuple(call.prompt[:5]) for call in sent}) == 1


def test_lengths_spread_about_their_means() -> None:
    sent = calls(
        tokenizer=str(DEMO),
        requests=4000,
        prompt_tokens=50,
        prompt_tokens_stddev=10,
        output_tokens=3,
        output_tokens_stddev=4,
    )
    lengths = [call.prompt_tokens or 0 for call in sent]
    assert fmean(lengths) == pytest.approx(50, abs=0.6)
    assert pstdev(lengths) == pytest.approx(10, abs=0.4)
    assert min(call.output_tokens for call in sent) == 1
    assert max(call.output_tokens for call in sent) > 10
    assert all(len(str(call.prompt).split(" ")) == call.prompt_tokens for call in sent)


@pytest.mark.parametrize(
    ("values", "tokens"),
    [({}, 2), ({"tokenizer": str(DEMO)}, 2), ({"tokenizer": str(DEMO), "token_ids": True}, 1)],
)
def test_no_two_prompts_are_equal(values: dict[str, object], tokens: int) -> None:
    """Nor by chance: of 4000 that are only drawn, dozens or more would be."""
    prompts = [call.prompt for call in calls(requests=4000, prompt_tokens=tokens, **values)]
    assert len(set(map(str, prompts))) == 4000


def test_without_a_tokenizer_a_token_is_a_word_and_nothing_is_known() -> None:
    (call,) = calls(requests=1, prompt_tokens=12)
    assert isinstance(call.prompt, str)
    assert len(call.prompt.split(" ")) == 12
    assert call.prompt_tokens is None


def test_what_was_asked_for_is_known_without_a_tokenizer(tmp_path: Path) -> None:
    (call,) = calls(requests=1, prompt_tokens=12, shared_prefix_tokens=5)
    assert call.asked_prompt_tokens == 17
    (inputs,) = calls("openai-embeddings", requests=1, prompt_tokens=12, batch_size=3)
    assert inputs.asked_prompt_tokens == 36
    (tensors,) = calls("kserve-http", requests=1)
    assert tensors.asked_prompt_tokens is None
    trace = write(tmp_path, "trace.csv", "Timestamp,Request tokens,Response tokens", "0,30,2")
    (recorded,) = calls(trace=trace)
    assert recorded.asked_prompt_tokens == 30


def test_a_tokenizer_that_joins_words_is_noticed() -> None:
    assert Vocabulary(joining()).words == []
    assert Vocabulary(rarely_joining()).words == []
    assert Vocabulary(letters()).words == []
    assert len(Vocabulary(word_pieces()).words) == 90
    assert len(Vocabulary(demo()).words) > 300


def test_a_tokenizer_whose_words_depend_on_their_neighbours_is_noticed() -> None:
    tokenizer = word_pieces()
    tokenizer.normalizer = normalizers.Replace("n c", "nc")
    assert Vocabulary(tokenizer).words == []


@pytest.mark.parametrize("tokens", [8, 50])
def test_a_fitted_piece_counts_as_what_follows_other_text(tokens: int) -> None:
    piece = FittedWords(Vocabulary(letters()), 0).piece(tokens, Random(1))
    assert len(letters().encode(f"x {piece}").ids) == 1 + tokens


def test_a_length_that_no_text_has(tmp_path: Path) -> None:
    path = saved(doubled_letters(), tmp_path)
    with pytest.raises(LoadTestError, match="no text of exactly 1 tokens"):
        calls(tokenizer=path, requests=1, prompt_tokens=1)


def test_tokenizers_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match=r"there is no file .*tokenizer.json"):
        load_vocabulary(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadTestError, match=r"tokenizer.json: "):
        load_vocabulary(str(tmp_path))
