"""The metadata of a GGUF file as tokenizer.json and tokenizer_config.json have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from ..errors import TokenizerError
from .byte_level import byte_level_tokenizer
from .sentencepiece import sentencepiece_tokenizer
from .vocabulary import Vocabulary, read_vocabulary

_KINDS = {"gpt2": byte_level_tokenizer, "llama": sentencepiece_tokenizer}
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
        _text_of(metadata, vocabulary, role) if wanted else None for role, wanted in (("bos", begins), ("eos", ends))
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
    found: dict[str, Any] = {}
    for role, name in _ROLES.items():
        text = _text_of(metadata, vocabulary, role)
        if text is not None:
            found[name] = text
    found_names = metadata.get("tokenizer.chat_templates")
    names = found_names if isinstance(found_names, list) else []
    templates = {str(name): metadata.get(f"tokenizer.chat_template.{name}") for name in names}
    templates["default"] = metadata.get("tokenizer.chat_template")
    given = [{"name": name, "template": text} for name, text in templates.items() if isinstance(text, str)]
    return found | ({"chat_template": given} if given else {})


def end_token_ids_of(metadata: Mapping[str, Any]) -> list[int]:
    """Those that end an answer. Raises TokenizerError."""
    vocabulary = read_vocabulary(metadata)
    eos = _text_of(metadata, vocabulary, "eos")  # also one that the metadata does not name
    return sorted(vocabulary.ends | ({vocabulary.ids[eos]} if eos is not None else set()))


def _around(metadata: Mapping[str, Any], kind: str) -> tuple[bool, bool]:
    """Whether a text is begun and ended by special tokens."""
    begins = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _BEGIN_BY_DEFAULT
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
