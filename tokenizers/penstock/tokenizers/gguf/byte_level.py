"""Byte-level BPE of GGUF files: tokenizer.ggml.model is gpt2.

The file names how a text is split into words and does not spell it out. The expressions are those of the models' own
tokenizer.json; which names share one is in llama.cpp's src/llama-vocab.cpp.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..errors import TokenizerError
from ..one_call import is_of_the_library
from .vocabulary import Vocabulary

logger = logging.getLogger(__name__)

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
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
"""llama.cpp's, for files of any model that do not say more."""
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    "[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",  # the model's own has ranges: these letters as Unicode had them then
    r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    _EAST_ASIAN,
    r"\p{N}+",
)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
_SEED_CODER = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _LINES_AND_SPACES
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

_LIKE_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
_LIKE_QWEN2 = (
    "qwen2",
    "deepseek-r1-qwen",
    "stablelm2",
    "hunyuan",
    "megrez",
    "kormo",
    "f2llmv2",
    "solar-open",
    "grok-2",
)
_LIKE_GPT2 = ("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4", "granite-docling")
_LIKE_SMOLLM = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys((*_LIKE_LLAMA3, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(_LIKE_QWEN2, (_QWEN2,)),
    "qwen35": (_QWEN35,),
    **dict.fromkeys((*_LIKE_GPT2, "gigachat", "a.x-4.0", "mellum"), (_GPT2,)),
    **dict.fromkeys(_LIKE_SMOLLM, _DIGITS_GPT2),
    "falcon": _FALCON,
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    "viking": (_BLOOM, r"\p{N}"),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (_GPT4O,)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "seed-coder": (_SEED_CODER,),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), (_BAILING,)),
}
"""Expressions by tokenizer.ggml.pre. Each splits what those before it have left."""
_WHOLE_WORDS = frozenset((*_LIKE_LLAMA3, "tekken", "gpt-4o", "llama4"))
"""A word that is a token stays one, whatever its merges."""
_COMPOSED = frozenset(("qwen2", "deepseek-r1-qwen"))
"""Their own tokenizers bring a text into Unicode's form NFC; llama.cpp does not."""
_OF_ARCHITECTURE = {
    **dict.fromkeys(("qwen2", "qwen2moe", "qwen3", "qwen3moe"), "qwen2"),
    "gpt2": "gpt-2",
    "phi2": "phi-2",
    "starcoder2": "starcoder",
    "falcon": "falcon",
    "bloom": "bloom",
}
"""Files from before there were names: by general.architecture, where all of its models are tokenized alike."""


def _name_of(metadata: Mapping[str, Any]) -> str:
    name = metadata.get("tokenizer.ggml.pre")
    if name in (None, "", "default"):
        name = _OF_ARCHITECTURE.get(str(metadata.get("general.architecture")))
    if name is None:
        logger.warning(
            "the GGUF file does not name how its model splits texts (tokenizer.ggml.pre): they are split by "
            "llama.cpp's default, and answers may be worse than the model's"
        )
    return str(name or "default")


def byte_level_tokenizer(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> Tokenizer:
    """Without special tokens. Raises TokenizerError."""
    name = _name_of(metadata)
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
