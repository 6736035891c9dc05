"""Texts joined by a template are what the `tokenizers` library makes of them, cut or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

import support.tokenizers
from penstock.tokenizers import Tokenizer, TokenizerError

TEXT = st.text(alphabet="a dog.in BERN\u00e9", max_size=40)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = support.tokenizers.save_folder(tmp_path_factory.mktemp("bert"), support.tokenizers.bert())
    return Tokenizer(folder)


def library(most: int | None, *, cut_start: bool = False) -> tokenizers.Tokenizer:
    backend = support.tokenizers.bert()
    if most is not None:
        backend.enable_truncation(most, direction="left" if cut_start else "right")
    return backend


@given(text=TEXT, most=st.none() | st.integers(2, 20), cut_start=st.booleans())
def test_one_text(tokenizer: Tokenizer, text: str, most: int | None, cut_start: bool) -> None:
    wanted = library(most, cut_start=cut_start).encode(text)
    found = tokenizer.template.join(tokenizer.encode_many([text]), most, cut_start=cut_start)
    assert (found.ids, found.types) == (wanted.ids, wanted.type_ids)


@given(first=TEXT, second=TEXT, most=st.none() | st.integers(4, 30), cut_start=st.booleans())
def test_a_pair(tokenizer: Tokenizer, first: str, second: str, most: int | None, cut_start: bool) -> None:
    wanted = library(most, cut_start=cut_start).encode(first, second)
    found = tokenizer.pair_template.join(tokenizer.encode_many([first, second]), most, cut_start=cut_start)
    assert (found.ids, found.types) == (wanted.ids, wanted.type_ids)


def test_a_tokenizer_without_special_tokens(tmp_path: Path) -> None:
    plain = Tokenizer(support.tokenizers.save_folder(tmp_path, support.tokenizers.byte_level()))
    [ids] = plain.encode_many(["a dog"])
    assert plain.template.join([ids]).ids == plain.encode("a dog")
    assert plain.template.num_specials == 0


def test_text_that_cannot_be_encoded(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="Unicode"):
        tokenizer.encode_many(["good", "\ud800"])
