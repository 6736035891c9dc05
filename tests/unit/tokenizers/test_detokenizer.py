from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders

from penstock.tokenizers import IncrementalDetokenizer, Tokenizer
from penstock.tokenizers.token_table import DecoderKind
from support.tokenizers import KINDS, TEXTS, build, byte_fallback, metaspace, save_folder

REPLACE = decoders.Replace("▁", " ")
STRIP = decoders.Strip(content=" ", left=1, right=0)

FAMILIES = {
    "byte_level": DecoderKind.BYTES,
    "byte_fallback": DecoderKind.BYTE_RUNS,
    "unigram_fallback": DecoderKind.BYTE_RUNS,
    "metaspace": DecoderKind.PIECES,
    "wordpiece": DecoderKind.GENERAL,
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {kind: Tokenizer(save_folder(folder / kind, build(kind))) for kind in KINDS}


def detokenize(tokenizer: Tokenizer, pieces: list[list[int]], skip: bool, prompt: tuple[int, ...] = ()) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip, prompt)
    return "".join([*map(detokenizer.push, pieces), detokenizer.flush()])


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_decoder_section_selects_the_family(loaded: dict[str, Tokenizer], kind: str) -> None:
    assert loaded[kind].table.family is FAMILIES[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_token_by_token(loaded: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = loaded[kind]
    ids = tokenizer.encode(f"{text}\n{text}<|im_end|> end")
    for skip in (True, False):
        assert detokenize(tokenizer, [[i] for i in ids], skip) == tokenizer.decode(ids, skip)


def any_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    one = st.one_of(
        st.integers(0, tokenizer.vocab_size + 3),
        st.sampled_from(sorted(tokenizer.table.partial) or [0]),
        st.sampled_from(sorted(tokenizer.special_ids)),
    )
    return st.lists(one, max_size=24)


@pytest.fixture(scope="module")
def ids_of(loaded: dict[str, Tokenizer]) -> dict[str, st.SearchStrategy[list[int]]]:
    return {kind: any_ids(tokenizer) for kind, tokenizer in loaded.items()}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=120)
@given(data=st.data())
def test_any_ids_in_any_split(
    loaded: dict[str, Tokenizer], ids_of: dict[str, st.SearchStrategy[list[int]]], kind: str, data: st.DataObject
) -> None:
    tokenizer = loaded[kind]
    ids = data.draw(ids_of[kind])
    cuts = data.draw(st.lists(st.integers(0, 24), max_size=24))
    skip = data.draw(st.booleans())
    assert detokenize(tokenizer, split(ids, cuts), skip) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100)
@given(data=st.data())
def test_any_text_in_any_split(loaded: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    tokenizer = loaded[kind]
    text = data.draw(st.text(st.sampled_from("".join(TEXTS) + "\x00𝕏\u200d\ufe0f\ufffd"), max_size=30))
    ids = tokenizer.encode(text)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=10))
    assert detokenize(tokenizer, split(ids, cuts), True) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram_fallback"])
@settings(max_examples=150)
@given(data=st.binary(max_size=12))
def test_any_bytes(loaded: dict[str, Tokenizer], kind: str, data: bytes) -> None:
    tokenizer = loaded[kind]
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size - 1, -1, -1)}
    ids = [by_byte[data[n : n + 1]] for n in range(len(data))]
    assert detokenize(tokenizer, [[i] for i in ids], True) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_nothing_of_an_unfinished_character_comes_out(loaded: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = loaded[kind]
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push([i]) for i in tokenizer.encode("a 🧿 b")]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces).strip() == "a 🧿 b"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(data=st.data())
def test_a_completion_continues_the_text_of_its_prompt(
    loaded: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = loaded[kind]
    whole = sorted(tokenizer.table.texts) or list(range(tokenizer.vocab_size))
    prompt = data.draw(st.lists(st.sampled_from(whole), min_size=1, max_size=12))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=8))
    before, all_of_it = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
    assert before + detokenize(tokenizer, [[i] for i in ids], True, tuple(prompt)) == all_of_it


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_character_begun_in_the_prompt_is_finished(loaded: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = loaded[kind]
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size - 1, -1, -1)}
    prompt = tuple(by_byte[bytes((b,))] for b in "x🧿".encode()[:-2])
    ids = [by_byte[bytes((b,))] for b in "🧿y".encode()[2:]]
    assert detokenize(tokenizer, [[i] for i in ids], True, prompt) == "🧿y"
    assert detokenize(tokenizer, [], True, prompt) == ""
    assert detokenize(tokenizer, [[tokenizer.id_of("z") or 0]], True, prompt) == "z"


def test_characters_of_the_prompt_do_not_come_out_again(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_fallback"]
    prompt = tuple(tokenizer.encode("x 🧿"))
    ids = tokenizer.encode("🧿 y")[1:]
    assert detokenize(tokenizer, [ids], True, prompt) == "🧿 y"


VARIANTS: dict[str, tuple[list[Any], DecoderKind]] = {
    "gemma": ([REPLACE, decoders.ByteFallback(), decoders.Fuse()], DecoderKind.BYTE_RUNS),
    "no fuse": ([REPLACE, decoders.ByteFallback()], DecoderKind.BYTE_RUNS),
    "no replace": ([decoders.ByteFallback(), decoders.Fuse(), STRIP], DecoderKind.BYTE_RUNS),
    "marks vanish": (
        [decoders.Replace("▁", ""), decoders.Replace("t", "T"), decoders.ByteFallback(), decoders.Fuse()],
        DecoderKind.BYTE_RUNS,
    ),
    "nested": ([decoders.Sequence([decoders.ByteLevel()])], DecoderKind.BYTES),
    "strip each token": ([REPLACE, STRIP, decoders.Fuse()], DecoderKind.GENERAL),
    "pattern": ([decoders.Replace(Regex("▁+"), " "), decoders.ByteFallback(), decoders.Fuse()], DecoderKind.GENERAL),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_the_decoder(tmp_path: Path, name: str) -> None:
    steps, family = VARIANTS[name]
    backend = byte_fallback()
    backend.decoder = decoders.Sequence(steps)
    tokenizer = Tokenizer(save_folder(tmp_path, backend))
    assert tokenizer.table.family is family
    draw = random.Random(7)
    ids_of = list(range(tokenizer.vocab_size)) if family is not DecoderKind.GENERAL else list(range(262, 300))
    for _ in range(300):
        ids = draw.choices(ids_of, k=draw.randrange(12))
        assert detokenize(tokenizer, [[i] for i in ids], False) == tokenizer.decode(ids, False)


def test_without_a_decoder_tokens_are_words(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer = Tokenizer(save_folder(tmp_path, backend))
    assert detokenize(tokenizer, [[1], [2], [2, 1]], True) == tokenizer.decode([1, 2, 2, 1]) == "a b b a"


def test_the_general_path_gives_up_waiting_for_a_character(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "\ufffd": 1}, unk_token="<unk>"))
    tokenizer = Tokenizer(save_folder(tmp_path, backend))
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push([1]) for _ in range(100)]
    assert any(pieces)
    assert "".join([*pieces, detokenizer.flush()]) == tokenizer.decode([1] * 100)


@pytest.mark.parametrize("strip", [0, 1, 2])
def test_leading_spaces_are_dropped_only_at_the_start(tmp_path: Path, strip: int) -> None:
    tokenizer = Tokenizer(save_folder(tmp_path, byte_fallback(strip)))
    space = tokenizer.id_of("▁")
    assert space is not None
    for ids in ([space] * 4, [space, 2, space, tokenizer.id_of("a") or 0, space]):
        assert detokenize(tokenizer, [[i] for i in ids], True) == tokenizer.decode(ids)


@pytest.mark.parametrize("scheme", ["always", "never", "first"])
def test_metaspace_schemes(tmp_path: Path, scheme: str) -> None:
    tokenizer = Tokenizer(save_folder(tmp_path, metaspace(scheme)))
    ids = tokenizer.encode("the fox  jumps")
    assert detokenize(tokenizer, [[i] for i in ids], True) == tokenizer.decode(ids)
