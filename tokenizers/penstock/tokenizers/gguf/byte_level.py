"""Byte-level BPE of GGUF files: tokenizer.ggml.model is gpt2.

The file names how a text is split into words and does not spell it out. The expressions are those of the models' own
tokenizer.json; which names share one is in llama.cpp's src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..errors import TokenizerError
from ..one_call import is_of_the_library
from .vocabulary import Vocabulary

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _LINES_AND_SPACES
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _LINES_AND_SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _LINES_AND_SPACES
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _LINES_AND_SPACES
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _LINES_AND_SPACES,
)
_DIGITS_GPT2 = (r"\p{N}", _GPT2)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_GPT2),
    "falcon": _FALCON,
    "bloom": (_BLOOM,),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK_V3),
}
"""Expressions by tokenizer.ggml.pre. Each splits what those before it have left."""
_WHOLE_WORDS = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken", "gpt-4o", "llama4"))
"""A word that is a token stays one, whatever its merges."""
_COMPOSED = frozenset(("qwen2", "deepseek-r1-qwen"))
"""Their own tokenizers bring a text into Unicode's form NFC; llama.cpp does not."""


def byte_level_tokenizer(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> Tokenizer:
    """Without special tokens. Raises TokenizerError."""
    name = str(metadata.get("tokenizer.ggml.pre"))
    if name not in _SPLITS:
        raise TokenizerError(
            f"the GGUF file splits texts by {name[:50]!r} (tokenizer.ggml.pre), which is not supported; "
            f"supported are {', '.join(sorted(_SPLITS))}"
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise TokenizerError("the GGUF file has no tokenizer.ggml.merges")
    try:
        model = models.BPE(vocabulary.ids, [_pair(merge) for merge in merges], ignore_merges=name in _WHOLE_WORDS)
    except BaseException as error:
        if not is_of_the_library(error):
            raise
        raise TokenizerError(f"the GGUF file's vocabulary cannot be used: {error}") from None
    tokenizer = Tokenizer(model)
    if name in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in _SPLITS[name]]
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, words])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: object) -> tuple[str, str]:
    left, space, right = str(merge).partition(" ")
    if not (left and space and right):
        raise TokenizerError(f"tokenizer.ggml.merges has {str(merge)[:50]!r}, which is no pair")
    return left, right
