"""Tokenizers with the splits of well-known models, and texts that are hard to cut."""

from __future__ import annotations

import tokenizers
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors, trainers

from support.tokenizers import SPECIALS, TEXTS

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
QWEN_2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
KIMI_K2 = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    rf"{CONTRACTIONS}?|\p{{N}}{{1,3}}|{REST}"
)

SPLITS: dict[str, pre_tokenizers.PreTokenizer] = {}


def _splits(*patterns: str) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(Regex(each), "isolated") for each in patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


SPLITS |= {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "gpt2_with_first_space": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "llama3": _splits(LLAMA_3),
    "qwen2": _splits(QWEN_2),
    "o200k": _splits(O200K),
    "cl100k": _splits(CL100K),
    "deepseek3": _splits(*DEEPSEEK_3),
    "kimi_k2": _splits(KIMI_K2),
    "starcoder": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "metaspace_first": pre_tokenizers.Metaspace(prepend_scheme="first"),
    "metaspace_always": pre_tokenizers.Metaspace(prepend_scheme="always"),
}

FRAGMENTS = [
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\r", "\t", "\u00a0", "\u3000", "\u2028", "\x85"),
    *("a", "Z", "the", "The", "hello", "isn't", "'s", "'S", "'ll", "'", "’", "é", "e\u0301", "ß", "İ", "\u017f", "Σ"),
    *(
        "1",
        "12",
        "3456",
        "7890123",
        "²",
        "٣",
        "½",
        "１",
        "1a",
        "a1",
        "x_1",
        ".",
        ",",
        "...",
        "--",
        "=",
        "<",
        ">",
        "/",
        "#",
    ),
    *(
        "你",
        "好世界",
        "。",
        "，",
        "ひらがな",
        "カタカナ",
        "ー",
        "가나",
        "\u1100\u1161",
        "\u11a8",
        "प्र",
        "\u0bbe",
        "д",
        "й",
    ),
    *(
        "\u0301",
        "\u0338",
        "\u20e3",
        "\u200d",
        "\ufe0f",
        "👋🏽",
        "👨‍👩‍👧",
        "▁",
        "\u212a",
        "ﬁ",
        "Ａ",
        "º",
        "\x00",
        "\ufffd",
    ),
    *("<|im_start|>", "<|im_end|>", "<|im_", "start|>", "<|", "|>", "<s>", "</s>", "<unk>", "｜tool｜", "cafe\u0301"),
]
HARD_TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=24).map("".join)


def split_bpe(
    split: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None
) -> tokenizers.Tokenizer:
    """BPE of bytes, or of characters behind Metaspace, that puts <s> before a text and </s> behind it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = [] if isinstance(split, pre_tokenizers.Metaspace) else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator([*TEXTS, *(one + two for one in FRAGMENTS for two in FRAGMENTS)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer
