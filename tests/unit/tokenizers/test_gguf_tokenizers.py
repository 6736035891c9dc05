"""Tokenizers out of a GGUF file's metadata give the ids of the tokenizers that the metadata was made from."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from penstock.tokenizers import TokenizerError
from penstock.tokenizers.gguf_tokenizer import _SPLITS, end_token_ids_of, tokenizer_config_of, tokenizer_of

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? 12345 times in 2024.",
    "def main(argv):\n    return [x ** 2 for x in range(100)]  # squares\n\n\n",
    "Grüße aus Köln, où l'été s'achève. 你好，世界！ Привет, мир. I'LL THEY'RE we've",
] * 3
TEXTS = st.text(
    st.one_of(
        st.characters(codec="utf-8", exclude_categories=("Cs",)), st.sampled_from("the quick '\n\t 0123456789üéñ你世")
    ),
    max_size=60,
)
SPECIAL = ("<unk>", "<s>", "</s>")

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(*splits: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metadata_of(tokenizer: Tokenizer, kind: str, **more: Any) -> dict[str, Any]:
    vocabulary = tokenizer.get_vocab()
    texts = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    found = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [3 if text in SPECIAL else 1 for text in texts],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return found | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


@cache
def original(name: str) -> Tokenizer:
    if name == "smollm":
        return byte_level(pre_tokenizers.Digits(individual_digits=True))
    expression = QWEN2 if name == "qwen2" else QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
    tokenizer = byte_level(pre_tokenizers.Split(Regex(expression), "isolated"))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@cache
def made(name: str) -> Tokenizer:
    return tokenizer_of(metadata_of(original(name), "gpt2", pre=name))


@settings(max_examples=200)
@given(TEXTS, st.sampled_from(["qwen2", "llama-bpe"]))
def test_byte_level(text: str, name: str) -> None:
    ids = original(name).encode(text, add_special_tokens=False).ids
    assert made(name).encode(text, add_special_tokens=False).ids == ids
    assert made(name).decode(ids) == original(name).decode(ids)


def pieces(text: str, **metadata: Any) -> list[str]:
    """What the words of a text are before they are tokens."""
    tokenizer = tokenizer_of(metadata_of(original("qwen2"), "gpt2") | metadata)
    return [text[slice(*place)] for _, place in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


MIXED = "x = 1234567 + 'abc'\r\n  don't Go!! **bold**"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("default", ["x", " ", "=", " ", "123", "456", "7", " ", "+", " ", "'", "abc", "'", "\r\n "]),
        ("deepseek-coder", ["x", " = ", *"1234567", " +", " '", "abc", "'", "\r", "\n", " "]),
        ("deepseek-llm", ["x", " =", " ", "1234567", " +", " '", "abc", "'", "\r", "\n", " "]),
        ("glm4", ["x", " =", " ", "123", "456", "7", " +", " '", "abc", "'\r\n", " "]),
        ("seed-coder", ["x", " =", " ", *"1234567", " +", " '", "abc", "'", "\r\n", " "]),
        ("mellum", ["x", " =", " 1234567", " +", " '", "abc", "'", "\r\n "]),
    ],
)
def test_how_a_text_is_split(name: str, wanted: list[str]) -> None:
    assert pieces(MIXED, **{"tokenizer.ggml.pre": name})[: len(wanted)] == wanted


MIXED_SCRIPTS = "we 你好，世界 über. 안녕  "


@pytest.mark.parametrize(
    ("name", "umlaut"),
    [("deepseek-coder", [" über"]), ("deepseek-llm", [" ü", "ber"])],  # a later expression has ASCII's letters again
)
def test_scripts_are_split(name: str, umlaut: list[str]) -> None:
    words = pieces(MIXED_SCRIPTS, **{"tokenizer.ggml.pre": name})
    assert words[: 5 + len(umlaut)] == ["we", " ", "你好", "，", "世界", *umlaut]
    assert "".join(words) == MIXED_SCRIPTS
    assert "안녕" in words


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("kimi-k2", "it's 你好world, 12345/\n", ["it's", " ", "你好", "world", ",", " ", "123", "45", "/\n"]),
        ("youtu", "Hi’안녕。世界 12", ["Hi", "’", "안녕", "。", "世界", " ", "1", "2"]),
        ("afmoe", "1234567 世界 #include", ["1", "234", "567", " ", "世界", " #", "include"]),
        ("jais-2", "a" + " " * 7 + "b", ["a", " " * 4, " " * 2, " b"]),
        ("minicpm5", "12345 we've", ["123", "45", " we", "'ve"]),
    ],
)
def test_splits_of_single_models(name: str, text: str, wanted: list[str]) -> None:
    assert pieces(text, **{"tokenizer.ggml.pre": name}) == wanted


@pytest.mark.parametrize("named", [{}, {"tokenizer.ggml.pre": "default"}, {"tokenizer.ggml.pre": ""}])
def test_files_without_a_name_are_split_as_their_architecture_is(named: dict[str, Any], caplog: Any) -> None:
    digits = pieces("1234567", **named, **{"general.architecture": "qwen2"})
    assert digits == list("1234567")
    assert not caplog.records
    assert pieces("1234567", **named, **{"general.architecture": "llama"}) == ["123", "456", "7"]
    assert "does not name how" in caplog.text, "nothing says which of many tokenizers it is"


@pytest.mark.parametrize("name", sorted(_SPLITS))
def test_every_name_gives_the_text_back(name: str) -> None:
    tokenizer = tokenizer_of(metadata_of(original("qwen2"), "gpt2", pre=name))
    for text in (*CORPUS, MIXED, MIXED_SCRIPTS):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_names_that_are_not_known_are_refused() -> None:
    with pytest.raises(
        TokenizerError, match=r"'superbpe' .* which is not supported; supported are a\.x-4\.0, afmoe, bail"
    ):
        tokenizer_of(metadata_of(original("qwen2"), "gpt2", pre="superbpe"))


def ends_of(tokens: list[str], kinds: list[int] | None = None, **more: int) -> set[str]:
    """Texts of the tokens that end an answer."""
    metadata = {f"tokenizer.ggml.{key}": value for key, value in more.items()}
    metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}
    metadata["tokenizer.ggml.token_type"] = kinds or [3] * len(tokens)
    return {tokens[i] for i in end_token_ids_of(metadata)}


HARMONY = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|channel|>", "<|start|>", "<|end|>", "<|call|>"]


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        (HARMONY, {"<|endoftext|>", "<|return|>", "<|call|>"}),
        (["<|user|>", "<|end|>", "<|endoftext|>"], {"<|end|>", "<|endoftext|>"}),
        (["<|end|>", "<|return|>"], {"<|end|>", "<|return|>"}),
        (["<|flush|>", "<|calls|>", "<|end|>"], {"<|flush|>", "<|calls|>"}),
        (["<s>", "<EOT>", "_<EOT>", "</s>", "<end_of_utterance>"], {"<EOT>", "_<EOT>", "</s>", "<end_of_utterance>"}),
        (["<start_of_turn>", "<end_of_turn>", "<eos>"], {"<end_of_turn>", "<eos>"}),
        (["<turn|>", "<|tool_response>", "</s>"], {"<turn|>", "<|tool_response>"}),
        (["[BOS]", "[EOS]", "[EOT]"], {"[EOS]", "[EOT]"}),
        (["<|fim_prefix|>", "<|fim_pad|>", "<|file_sep|>"], {"<|fim_pad|>", "<|file_sep|>"}),
    ],
)
def test_ends_by_their_texts(tokens: list[str], wanted: set[str]) -> None:
    assert ends_of(tokens) == wanted


def test_ends_that_the_metadata_names() -> None:
    names = ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"]
    tokens = [f"<{name}-here>" for name in (*names, "bos")]
    assert ends_of(tokens, **{f"{name}_token_id": i for i, name in enumerate((*names, "bos"))}) == set(tokens[:-1])
    assert ends_of(["a", "b"], eos_token_id=7, eot_token_id=-1) == set(), "no such tokens"
    pieces_ = sentencepiece_metadata(sentencepiece(True))
    assert end_token_ids_of({k: v for k, v in pieces_.items() if not k.endswith("eos_token_id")}) == [2], "by default"


def test_ends_that_are_written_as_words_are_special_tokens() -> None:
    """Else a template's text never becomes one, and answers show it. </s> may be a tag of HTML."""
    metadata = metadata_of(original("qwen2"), "gpt2", pre="qwen2")
    tokens = metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<|im_end|>", "<EOT>"]
    metadata["tokenizer.ggml.token_type"] += [1, 4]
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.encode("a<|im_end|><EOT>").ids[1:] == [len(tokens) - 2, len(tokens) - 1]
    assert tokenizer.decode([len(tokens) - 2, len(tokens) - 1], skip_special_tokens=True) == ""
    assert ends_of(["<strong>", "</s>"], [4, 4]) == set()
    assert ends_of(["<strong>", "</s>"], [4, 3]) == {"</s>"}


def test_digits_stand_alone() -> None:
    assert made("smollm").encode("12 34").tokens == ["1", "2", "Ġ", "3", "4"]


@cache
def sentencepiece(begins: bool) -> Tokenizer:
    """As transformers writes a Llama tokenizer: SentencePiece's merges in the order of its scores."""
    spaces = normalizers.Replace(" ", "▁")
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if begins else spaces
    fallbacks = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*SPECIAL, *fallbacks], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if begins else parts)
    return tokenizer


def sentencepiece_metadata(tokenizer: Tokenizer, **more: Any) -> dict[str, Any]:
    found = metadata_of(tokenizer, "llama", **more)
    texts = found["tokenizer.ggml.tokens"]
    given_kinds = zip(texts, found["tokenizer.ggml.token_type"], strict=True)
    kinds = [6 if text.startswith("<0x") else kind for text, kind in given_kinds]
    scores = [-float(number) for number in range(len(texts))]
    return found | {"tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": kinds}


@cache
def made_pieces(begins: bool) -> Tokenizer:
    return tokenizer_of(sentencepiece_metadata(sentencepiece(begins), add_space_prefix=begins))


@pytest.mark.parametrize("text", [*CORPUS[:3], "quack foxes, overjumping 2012 worlds"])
def test_merges_are_in_the_order_of_the_scores(text: str) -> None:
    ids = sentencepiece(True).encode(text, add_special_tokens=False).ids
    assert made_pieces(True).encode(text, add_special_tokens=False).ids == ids


@settings(max_examples=200)
@given(TEXTS, st.booleans())
def test_sentencepiece_and_ours_agree_on_any_text(text: str, begins: bool) -> None:
    ids = sentencepiece(begins).encode(text, add_special_tokens=False).ids
    assert made_pieces(begins).encode(text, add_special_tokens=False).ids == ids
    decoded = sentencepiece(begins).decode(ids, skip_special_tokens=False)  # to its trainer, bytes are special
    assert made_pieces(begins).decode(ids) == decoded


@pytest.mark.parametrize(
    ("more", "begins", "ends"),
    [({}, True, False), ({"add_bos_token": False}, False, False), ({"add_eos_token": True}, True, True)],
)
def test_tokens_around_a_text(more: dict[str, Any], begins: bool, ends: bool) -> None:
    ids = tokenizer_of(sentencepiece_metadata(sentencepiece(True), **more)).encode("fox").ids
    assert (ids[0] == 1, ids[-1] == 2) == (begins, ends)
    byte_ids = tokenizer_of(metadata_of(original("qwen2"), "gpt2", pre="qwen2", **more)).encode("fox").ids
    assert (byte_ids[0] == 1, byte_ids[-1] == 2) == (False, ends), "unless the file asks for it"


def test_special_tokens_in_a_text_and_by_role() -> None:
    metadata = metadata_of(original("qwen2"), "gpt2", pre="qwen2")
    metadata["tokenizer.chat_template"] = "{{ messages }}"
    metadata |= {"tokenizer.chat_templates": ["rag"], "tokenizer.chat_template.rag": "{{ documents }}"}
    tokens = metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<tool>", "[PAD]", "[PAD]"]
    metadata["tokenizer.ggml.token_type"] += [4, 5, 5]
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.encode("a</s><tool>[PAD]").ids[1:3] == [2, len(tokens) - 3]
    assert tokenizer.decode([2, len(tokens) - 3], skip_special_tokens=True) == "<tool>"
    assert "[PAD]" not in tokenizer.get_vocab(), "an id without a token"
    begun = metadata | {"tokenizer.ggml.bos_token_id": len(tokens) - 1, "tokenizer.ggml.add_bos_token": True}
    assert tokenizer_of(begun).encode("</s>").ids == [2], "nor does a text begin with it"
    assert tokenizer_config_of(metadata) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": [
            {"name": "rag", "template": "{{ documents }}"},
            {"name": "default", "template": "{{ messages }}"},
        ],
    }


@pytest.mark.parametrize("text", ["The quick  fox", "ä\n\nfox ☃"])
def test_gemma4_has_merges_in_place_of_scores(text: str) -> None:
    original = sentencepiece(False)
    metadata = sentencepiece_metadata(original, add_bos_token=False)
    pairs = json.loads(original.to_str())["model"]["merges"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
    found = tokenizer_of(metadata | {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges})
    assert found.encode(text).ids == original.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"scores": None}, "no tokenizer.ggml.scores"),
        ({"precompiled_charsmap": [1, 2]}, "precompiled_charsmap, which is not supported"),
        ({"unknown_token_id": 10**6}, "unknown_token_id=1000000, which is no token"),
        ({"tokens": ["a"] * 3}, "token_type has"),
        ({"token_type": 3}, "token_type has 3"),
    ],
)
def test_what_cannot_be_served_is_named(more: dict[str, Any], message: str) -> None:
    metadata = sentencepiece_metadata(sentencepiece(True))
    with pytest.raises(TokenizerError, match=message):
        tokenizer_of(metadata | {f"tokenizer.ggml.{key}": value for key, value in more.items()})


def test_added_tokens_keep_their_ids() -> None:
    longer = Tokenizer.from_str(original("llama-bpe").to_str())
    longer.add_tokens([AddedToken("<x>", special=True)])
    metadata = metadata_of(longer, "gpt2", pre="llama-bpe")
    metadata["tokenizer.ggml.token_type"][-1] = 3
    assert tokenizer_of(metadata | {"tokenizer.ggml.add_bos_token": False}).encode("fox<x>").ids[
        -1
    ] == longer.token_to_id("<x>")
