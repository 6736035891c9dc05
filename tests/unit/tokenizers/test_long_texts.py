"""Long texts are encoded in pieces, and pieces have the tokens of the whole."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors

from penstock.gateway.models.language.models import find_model
from penstock.tokenizers import PromptTooLong, Tokenizer, TokenizerError
from penstock.tokenizers.bounded import BoundedEncoder
from penstock.tokenizers.bounded.cuts import Cuts, read_cuts
from support.long_texts import FRAGMENTS, HARD_TEXTS, SPLITS, split_bpe
from support.tokenizers import build, byte_fallback, save_folder, wordpiece

NORMALIZERS = {"none": None, "NFC": normalizers.NFC(), "NFKC": normalizers.NFKC(), "NFD": normalizers.NFD()}
ENOUGH = 10**6
EVERYWHERE = [(split, "none") for split in SPLITS] + [("llama3", form) for form in NORMALIZERS if form != "none"]


@cache
def trained(split: str, form: str) -> tokenizers.Tokenizer:
    return split_bpe(SPLITS[split], NORMALIZERS[form])


@cache
def with_flagged_tokens(form: str) -> tokenizers.Tokenizer:
    """Added tokens that reach over spaces and digits, or look at what stands beside them."""
    tokenizer = split_bpe(SPLITS["qwen2"], NORMALIZERS[form])
    tokenizer.add_tokens(
        [
            AddedToken("the ", normalized=False),
            AddedToken("o 1", normalized=False),
            AddedToken("456", normalized=True),
            AddedToken("a,é", normalized=True),
            AddedToken("lo", single_word=True, normalized=False),
            AddedToken("#", lstrip=True, rstrip=True, normalized=False),
            AddedToken("...", single_word=True, normalized=False),
        ]
    )
    return tokenizer


@cache
def cuts_of(split: str, form: str = "none") -> Cuts:
    return read_cuts(trained(split, form))


def in_one_call(backend: tokenizers.Tokenizer, text: str, special: bool = True) -> list[int]:
    return list(backend.encode(text, add_special_tokens=special).ids)


@cache
def bounded(backend: tokenizers.Tokenizer, size: int) -> BoundedEncoder:
    return BoundedEncoder(backend, lambda text, special: in_one_call(backend, text, special), whole=size)


def in_pieces(backend: tokenizers.Tokenizer, text: str, size: int, special: bool = True) -> list[int]:
    return bounded(backend, size).encode(text, special, ENOUGH)


@pytest.mark.parametrize(("split", "form"), EVERYWHERE)
@settings(max_examples=30)
@given(text=HARD_TEXTS, size=st.integers(1, 32), special=st.booleans())
def test_pieces_have_the_tokens_of_the_whole(split, form, text, size, special):
    backend = trained(split, form)
    assert in_pieces(backend, text, size, special) == in_one_call(backend, text, special)


@pytest.mark.parametrize("form", ["none", "NFC"])
@given(text=HARD_TEXTS, size=st.integers(1, 16))
def test_added_tokens_are_not_cut(form, text, size):
    backend = with_flagged_tokens(form)
    assert in_pieces(backend, text, size) == in_one_call(backend, text)


@pytest.mark.parametrize("split", SPLITS)
@settings(max_examples=40)
@given(text=HARD_TEXTS)
@example(text="".join(FRAGMENTS))
def test_each_cut_is_between_words(split, text):
    """Stricter than tokens, which can be the same though the words are not."""
    backend = trained(split, "none")
    cuts = cuts_of(split)
    for at in places(cuts, text):
        left, right = (words(backend, part) for part in (text[:at], text[at:]))
        assert left + right == words(backend, text)


def places(cuts: Cuts, text: str) -> list[int]:
    return [at for at in range(1, len(text)) if cuts.next(text, 0, at, at + 1) == at]


def words(backend: tokenizers.Tokenizer, text: str) -> list[str]:
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("form", NORMALIZERS)
def test_there_are_cuts_in_plain_text(split, form):
    cuts = cuts_of(split, form)
    text = "It was 1984, and the clocks were striking."
    assert places(cuts, text)[:2] == [2, 6]


@pytest.mark.parametrize(
    ("split", "text"),
    [
        ("qwen2", "1234567"),
        ("starcoder", "1234567"),
        ("llama3", "1234567"),
        ("deepseek3", "1234567"),
        ("llama3", '{"a":1,"b":[2,3]}'),
        ("llama3", "Привет мир"),
        ("llama3", "你好，世界"),
        ("o200k", "aGVsbG8gd29ybGQ0"),
        ("kimi_k2", "世界，hello"),
    ],
)
def test_texts_without_spaces_are_cut(split, text):
    cuts = cuts_of(split)
    assert places(cuts, text)


def test_digits_are_cut_in_the_groups_of_the_whole_run():
    cuts = cuts_of("llama3")
    assert places(cuts, "x 1234567890 y") == [1, 5, 8, 11, 12]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Metaspace(split=False)),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Split(" ", "merged_with_next")),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Split(tokenizers.Regex(r"(?<=a) \b"), "isolated")),
        lambda t: setattr(t, "normalizer", normalizers.Strip()),
        lambda t: setattr(t, "normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("x")])),
        lambda t: setattr(t.model, "dropout", 0.5),
    ],
)
def test_nothing_is_claimed_of_tokenizers_that_are_not_understood(change):
    backend = split_bpe(SPLITS["gpt2"])
    assert read_cuts(backend) is not None
    change(backend)
    assert read_cuts(backend) is None


@pytest.mark.parametrize("make", [byte_fallback, wordpiece])
def test_nothing_is_claimed_of_llama_2_and_bert(make):
    assert read_cuts(make()) is None


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer(find_model(None).folder)


@given(text=HARD_TEXTS, size=st.integers(1, 32))
def test_the_demo_model_s_tokenizer(demo, text, size):
    assert in_pieces(demo._backend, text, size) == in_one_call(demo._backend, text)


@pytest.mark.parametrize("text", ["The 1st, isn't it? ", "0123456789", "déjà vu, 世界。\r\n", "<|im_start|>a  b"])
def test_a_limit_does_not_change_tokens(demo, text):
    long = text * (100_000 // len(text))
    assert demo.encode(long, limit=ENOUGH) == demo.encode(long)


@pytest.mark.parametrize("text", ["word ", "0123456789", "qzx", "世", "=", " ", "\n", "👋"])
def test_what_cannot_fit_is_refused_after_a_part_of_it(demo, monkeypatch, text):
    encoded = []
    encode = demo._bounded._encode
    monkeypatch.setattr(demo._bounded, "_encode", lambda text, special: encoded.append(text) or encode(text, special))
    with pytest.raises(PromptTooLong, match=r"^the text has more than 2000 tokens$"):
        demo.encode(text * (4_000_000 // len(text)), limit=2000)
    assert sum(map(len, encoded)) < 100_000


def test_a_text_that_is_too_long_by_its_last_piece_is_counted_wholly(demo):
    text = "word " * 8000
    whole = demo.encode(text)
    assert demo.encode(text, limit=len(whole) - 1) == whole


def test_short_texts_are_one_call(demo):
    text = "1" * 5000
    assert len(demo.encode(text, limit=3)) == 5000


def test_special_tokens_around_a_text_count(tmp_path: Path):
    backend = split_bpe(SPLITS["qwen2"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s>:0 $A:0 </s>:0 </s>:0", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    encoder = BoundedEncoder(backend, lambda text, special: in_one_call(backend, text, special), whole=4)
    assert encoder.encode("1234567", True, 10) == in_one_call(backend, "1234567")
    assert encoder.encode("1234567", False, 7) == in_one_call(backend, "1234567", False)
    with pytest.raises(PromptTooLong):
        encoder.encode("1234567", True, 6)


def test_text_that_is_not_unicode(demo, tmp_path):
    fallback = Tokenizer(save_folder(tmp_path, byte_fallback()))
    for tokenizer in (demo, fallback):
        with pytest.raises(TokenizerError, match="not valid Unicode"):
            tokenizer.encode("a\ud800" * 50_000, limit=ENOUGH)


def test_an_unknown_tokenizer_has_a_budget_of_characters():
    backend = build("wordpiece")
    calls = []

    def encode(text: str, special: bool) -> list[int]:
        calls.append(text)
        return in_one_call(backend, text, special)

    encoder = BoundedEncoder(backend, encode, whole=10, chars_per_token=4, spare_chars=20)
    assert encoder.encode("ab " * 20, False, 10) == in_one_call(backend, "ab " * 20, False)
    calls.clear()
    with pytest.raises(PromptTooLong, match="probably more than 10 tokens"):
        encoder.encode("ab " * 20 + "c", False, 10)
    assert not calls
