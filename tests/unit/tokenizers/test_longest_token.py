"""The least number of tokens that a text can have, known from its length."""

from __future__ import annotations

from functools import cache

import pytest
import tokenizers
from hypothesis import given
from tokenizers import AddedToken, normalizers

from penstock.tokenizers.bounded.longest_token import read_longest_token
from support.long_texts import HARD_TEXTS, SPLITS, split_bpe
from support.tokenizers import byte_fallback, metaspace, unigram_fallback, wordpiece


@cache
def backend(name: str) -> tokenizers.Tokenizer:
    if name == "byte_fallback":
        return byte_fallback()
    made = split_bpe(SPLITS[name.removesuffix("+NFC")], normalizers.NFC() if name.endswith("+NFC") else None)
    made.add_tokens([AddedToken("你好世界 hello hello hello", normalized=True)])
    return made


@pytest.mark.parametrize("name", ["llama3", "llama3+NFC", "gpt2_with_first_space", "deepseek3", "byte_fallback"])
@given(text=HARD_TEXTS)
def test_a_text_never_has_fewer(name, text):
    tokens = backend(name).encode(text, add_special_tokens=False).ids
    assert read_longest_token(backend(name)).fewest_tokens(text) <= len(tokens)


@pytest.mark.parametrize("name", ["llama3", "llama3+NFC", "byte_fallback"])
def test_only_tokens_of_the_text_s_own_characters_count(name):
    longest = read_longest_token(backend(name))
    assert longest.most > 7
    assert longest.fewest_tokens("7890123" * 10_000) > 70_000 // longest.most


def test_a_shorter_normal_form_is_allowed_for():
    """Nine bytes that become one character of three."""
    longest = read_longest_token(backend("llama3+NFC"))
    text = "\u1100\u1161\u11a8" * 100
    assert longest.fewest_tokens(text) <= len(backend("llama3+NFC").encode(text, add_special_tokens=False).ids)


def strips_spaces() -> tokenizers.Tokenizer:
    made = split_bpe(SPLITS["llama3"])
    made.add_tokens([AddedToken("<mask>", lstrip=True)])
    return made


def drops_spaces() -> tokenizers.Tokenizer:
    made = split_bpe(SPLITS["llama3"])
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Split(" ", "removed"), tokenizers.pre_tokenizers.ByteLevel(use_regex=False)]
    )
    return made


def lacks_bytes() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = SPLITS["gpt2"]
    return made


@pytest.mark.parametrize("make", [strips_spaces, drops_spaces, lacks_bytes, metaspace, unigram_fallback, wordpiece])
def test_nothing_is_known_where_a_token_can_stand_for_any_length(make):
    assert read_longest_token(make()) is None
