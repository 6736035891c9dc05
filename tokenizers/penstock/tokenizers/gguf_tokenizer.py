"""Tokenizers of GGUF files: the metadata as tokenizer.json and tokenizer_config.json have it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .errors import TokenizerError, is_of_the_library

logger = logging.getLogger(__name__)

# The list of tokens, and which of them end an answer.
#
# GGUF files name one end token or two; all others are known by their texts. The rule is that of llama.cpp, in
# src/llama-vocab.cpp, but for </s>: where it is no control token, as in Gemma's vocabulary, it is a tag of HTML.

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""ggml's numbers for the kinds of tokens (llama.h)."""
_END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Tokens that end an answer, by the metadata's names. Behind those of fill-in-the-middle another file would begin."""
_END_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
        *("<end_of_turn>", "<turn|>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "[e~["),
        "<｜end▁of▁sentence｜>",
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    )
)
_END_OR_TAG = "</s>"
_NO_ENDS = (
    (frozenset(("<|return|>", "<|call|>")), "<|end|>"),
    (frozenset(("<|return|>", "<|calls|>")), "<|end|>"),
    (frozenset(("<|flush|>", "<|call|>")), "<|end|>"),
    (frozenset(("<|flush|>", "<|calls|>")), "<|end|>"),
    (frozenset(("<|tool_response>",)), _END_OR_TAG),
)
"""Where a file has all of the former, the latter only ends a part of an answer (gpt-oss: a channel)."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, and the ids of those with a meaning of their own."""

    texts: list[str]
    ids: dict[str, int]
    """Of all tokens that are used. The first of several with the same text."""
    control: frozenset[int]
    user_defined: frozenset[int]
    """Found in a text before it is split, but no special tokens."""
    ends: frozenset[int]
    """An answer is complete with any of these."""


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Raises TokenizerError."""
    texts = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise TokenizerError("the GGUF file has no tokenizer.ggml.tokens: it holds no vocabulary")
    kinds = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(texts)
    if not isinstance(kinds, list) or len(kinds) != len(texts):
        has = len(kinds) if isinstance(kinds, list) else str(kinds)[:50]
        raise TokenizerError(f"the GGUF file has {len(texts)} tokens, and token_type has {has}")
    ids: dict[str, int] = {}
    for number, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
        if kind != _UNUSED:
            ids.setdefault(text, number)
    by_text = {ids[text] for text in _END_TEXTS & ids.keys()}
    known = {number: kind for number, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)}
    if known.get(ids.get(_END_OR_TAG, -1)) == _CONTROL:
        by_text.add(ids[_END_OR_TAG])
    # Some converters write these as words: no text of a template would become one of them.
    known |= dict.fromkeys(by_text, _CONTROL)
    return Vocabulary(
        texts,
        ids,
        frozenset(i for i, kind in known.items() if kind == _CONTROL and ids[texts[i]] == i and texts[i]),
        frozenset(i for i, kind in known.items() if kind == _USER_DEFINED and ids[texts[i]] == i and texts[i]),
        frozenset((*by_text, *_named_ends(metadata, len(texts)))) - {ids[text] for text in _no_ends(ids)},
    )


def _named_ends(metadata: Mapping[str, Any], count: int) -> Iterator[int]:
    for role in _END_ROLES:
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if type(token_id) is int and 0 <= token_id < count:
            yield token_id


def _no_ends(ids: Mapping[str, int]) -> Iterator[str]:
    return (text for needed, text in _NO_ENDS if text in ids and needed <= ids.keys())


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
_EXAONE_MOE = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_AT_THE_END = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
_JAIS2 = _LLAMA3.replace(r"\s+(?!\S)|\s+", _AT_THE_END + r"|\s{1}")
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _GPT4O.replace("{1,3}", ""),
)
_GROUPS_OF_THREE = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_SCRIPTS_OF_AFMOE = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_NO_HAN = r"&&[^\p{Han}]]"
_KIMI = r"\p{Han}+|" + _GPT4O.replace(r"\p{M}]", r"\p{M}" + _NO_HAN).replace(r"[\r\n/]*", r"[\r\n]*")
_MINICPM5 = (r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+"))
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
# Byte-level BPE: tokenizer.ggml.model is gpt2. The file names how a text is split into words and does not spell it out.
# The expressions are those of the models' own tokenizer.json; llama.cpp's llama-vocab.cpp says which names share one.
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys((*_LIKE_LLAMA3, "dbrx", "smaug-bpe", "glm4", "glm5", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(_LIKE_QWEN2, (_QWEN2,)),
    "qwen35": (_QWEN35,),
    **dict.fromkeys((*_LIKE_GPT2, "gigachat", "a.x-4.0", "mellum"), (_GPT2,)),
    **dict.fromkeys(_LIKE_SMOLLM, _DIGITS_GPT2),
    "falcon": _FALCON,
    "exaone-moe": (_EXAONE_MOE,),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    "viking": (_BLOOM, r"\p{N}"),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (_GPT4O,)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "kimi-k2": (_KIMI,),
    "youtu": _YOUTU,
    "afmoe": (_GROUPS_OF_THREE, _SCRIPTS_OF_AFMOE, _DEEPSEEK_V3[2]),
    "jais-2": (_JAIS2,),
    "minicpm5": _MINICPM5,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "seed-coder": (_SEED_CODER,),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), (_BAILING,)),
}
"""Expressions by tokenizer.ggml.pre. Each splits what those before it have left."""
_WHOLE_WORDS = frozenset((*_LIKE_LLAMA3, "tekken", "gpt-4o", "llama4", "glm4", "glm5", "youtu", "minicpm5"))
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
    tokenizer = Tokenizer(_model(vocabulary, _stored_merges(metadata), ignore_merges=name in _WHOLE_WORDS))
    if name in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[name]]
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, words])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _stored_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise TokenizerError("the GGUF file has no tokenizer.ggml.merges")
    return [_pair(merge) for merge in merges]


def _model(vocabulary: Vocabulary, merges: list[tuple[str, str]], **settings: Any) -> models.BPE:
    try:
        return models.BPE(vocabulary.ids, merges, **settings)
    except BaseException as error:
        if not is_of_the_library(error):
            raise
        raise TokenizerError(f"the GGUF file's vocabulary cannot be used: {error}") from None


def _pair(merge: object) -> tuple[str, str]:
    left, space, right = str(merge).partition(" ")
    if not (left and space and right):
        raise TokenizerError(f"tokenizer.ggml.merges has {str(merge)[:50]!r}, which is no pair")
    return left, right


# SentencePiece vocabularies of GGUF files: tokenizer.ggml.model is llama.
#
# Such a file has a score for each token and no merges: of all neighbours that make a token, those whose token has the
# highest score are merged first. As BPE has it, each pair of tokens that make a third is a merge, in the order of the
# scores.

_SPACE = "▁"


def sentencepiece_tokenizer(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> Tokenizer:
    """Without special tokens. Raises TokenizerError."""
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if metadata.get(f"tokenizer.ggml.{key}"):
            raise TokenizerError(f"the GGUF file has tokenizer.ggml.{key}, which is not supported")
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.texts):
        raise TokenizerError("the GGUF file has no tokenizer.ggml.scores for its tokens")
    begins = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return _spaced_tokenizer(metadata, vocabulary, list(_merges(vocabulary, scores)), begins)


def gemma4_tokenizer(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> Tokenizer:
    """As `sentencepiece_tokenizer`, with merges in the file."""
    return _spaced_tokenizer(metadata, vocabulary, _stored_merges(metadata), begins=False)


def _spaced_tokenizer(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, merges: list[tuple[str, str]], begins: bool
) -> Tokenizer:
    """Texts are not split. `begins`: a space is put in front of them."""
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if type(unknown) is not int or not 0 <= unknown < len(vocabulary.texts):
        raise TokenizerError(f"the GGUF file has unknown_token_id={str(unknown)[:50]}, which is no token")
    text = vocabulary.texts[unknown]
    tokenizer = Tokenizer(_model(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=text))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if begins else spaces
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if begins else parts)
    return tokenizer


def _merges(vocabulary: Vocabulary, scores: list[float]) -> Iterator[tuple[str, str]]:
    ids, own = vocabulary.ids, vocabulary.control | vocabulary.user_defined
    by_score = sorted((i for i in ids.values() if i not in own), key=lambda i: (-scores[i], i))
    for token_id in by_score:
        text = vocabulary.texts[token_id]
        for cut in range(1, len(text)):
            if text[:cut] in ids and text[cut:] in ids:
                yield text[:cut], text[cut:]


_KINDS = {"gpt2": byte_level_tokenizer, "llama": sentencepiece_tokenizer, "gemma4": gemma4_tokenizer}
"""By tokenizer.ggml.model."""
_BEGIN_BY_DEFAULT = ("llama3", "llama-v3", "llama-bpe", "tekken")
"""Byte-level tokenizers that begin a text with their first token, unless the metadata says otherwise."""
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_DEFAULTS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}}
"""Ids where the metadata is silent."""


def tokenizer_of(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises TokenizerError for a kind that is not known, and where parts are missing."""
    kind = str(metadata.get("tokenizer.ggml.model"))
    if kind not in _KINDS:
        raise TokenizerError(
            f"the GGUF file has a tokenizer of kind {kind[:50]}, which is not supported; supported are "
            + ", ".join(_KINDS)
        )
    vocabulary = read_vocabulary(metadata)
    tokenizer = _KINDS[kind](metadata, vocabulary)
    tokenizer.add_tokens(
        [
            AddedToken(vocabulary.texts[i], special=i in vocabulary.control, normalized=False)
            for i in sorted(vocabulary.control | vocabulary.user_defined)
        ]
    )
    begins, ends = _around(metadata, kind)
    before, after = (
        _text_of(metadata, vocabulary, role) if is_added else None
        for role, is_added in (("bos", begins), ("eos", ends))
    )
    if before or after:
        around = [(text, vocabulary.ids[text]) for text in (before, after) if text]
        single = [part for part in (before, "$A", after) if part]
        pair = [*single, *(f"{part}:1".replace("$A", "$B") for part in single)]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=around)
    return tokenizer


def tokenizer_config_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Special tokens by role, and chat templates."""
    vocabulary = read_vocabulary(metadata)
    config: dict[str, Any] = {}
    for role, name in _ROLES.items():
        text = _text_of(metadata, vocabulary, role)
        if text is not None:
            config[name] = text
    found_names = metadata.get("tokenizer.chat_templates")
    names = found_names if isinstance(found_names, list) else []
    templates = {str(name): metadata.get(f"tokenizer.chat_template.{name}") for name in names}
    templates["default"] = metadata.get("tokenizer.chat_template")
    named = [{"name": name, "template": text} for name, text in templates.items() if isinstance(text, str)]
    return config | ({"chat_template": named} if named else {})


def end_token_ids_of(metadata: Mapping[str, Any]) -> list[int]:
    """Those that end an answer. Raises TokenizerError."""
    vocabulary = read_vocabulary(metadata)
    eos = _text_of(metadata, vocabulary, "eos")  # also one that the metadata does not name
    return sorted(vocabulary.ends | ({vocabulary.ids[eos]} if eos is not None else set()))


def _around(metadata: Mapping[str, Any], kind: str) -> tuple[bool, bool]:
    """Whether a text is begun and ended by special tokens."""
    begins = kind in ("llama", "gemma4") or metadata.get("tokenizer.ggml.pre") in _BEGIN_BY_DEFAULT
    return bool(metadata.get("tokenizer.ggml.add_bos_token", begins)), bool(
        metadata.get("tokenizer.ggml.add_eos_token", False)
    )


def _text_of(metadata: Mapping[str, Any], vocabulary: Vocabulary, role: str) -> str | None:
    """Of the token with this role."""
    default = _DEFAULTS.get(str(metadata.get("tokenizer.ggml.model")), {}).get(role)
    token_id = metadata.get(f"tokenizer.ggml.{role}_token_id", default)
    if type(token_id) is not int or not 0 <= token_id < len(vocabulary.texts):
        return None
    text = vocabulary.texts[token_id]
    return text if text in vocabulary.ids else None
