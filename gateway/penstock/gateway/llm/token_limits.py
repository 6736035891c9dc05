"""What a request says about single tokens: which are allowed, which words are bad, and what else changes logits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from penstock.engines.contract.messages import ProcessorCall
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.engines.kit.sampling.processors import processor_names
from penstock.tokenizers import Tokenizer

MAX_BAD_WORDS = 128
MAX_WORD_CHARS = 256
MAX_PROCESSORS = 16


class ProcessorSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A logits processor with parameters, in vLLM's words."""

    qualname: str
    kwargs: dict[str, Any] = {}


def allowed_tokens(ids: Collection[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    """Raises InvalidRequestError."""
    if ids is None:
        return None
    name = "allowed_token_ids"
    if not ids:
        raise InvalidRequestError(f"{name} must not be empty.", param=name)
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InvalidRequestError(f"{name}: a token id is not in the vocabulary.", param=name)
    return tuple(sorted(set(ids)))


def bad_words(words: Sequence[str] | None) -> tuple[str, ...]:
    """Still as texts. Raises InvalidRequestError."""
    if len(words or ()) > MAX_BAD_WORDS:
        raise InvalidRequestError(f"bad_words: at most {MAX_BAD_WORDS} are allowed.", param="bad_words")
    if any(not word.strip() or len(word) > MAX_WORD_CHARS for word in words or ()):
        message = f"bad_words: each must have 1 to {MAX_WORD_CHARS} characters, not all of them white space."
        raise InvalidRequestError(message, param="bad_words")
    return tuple(words or ())


def word_tokens(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, and those that it has behind a space, where they are others."""
    rows: list[list[int]] = []
    for word in words:
        alone = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        behind = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        rows.append(alone)
        if behind[-len(alone) :] != alone:
            rows.append(behind)
    return tuple(tuple(ids) for ids in rows if ids)


def logits_processors(given: Sequence[str | ProcessorSpec] | None, info: ModelInfo) -> tuple[ProcessorCall, ...]:
    """Raises InvalidRequestError for a name that is not installed, UnsupportedError."""
    name = "logits_processors"
    specs = [ProcessorSpec(one) if isinstance(one, str) else one for one in given or ()]
    if len(specs) > MAX_PROCESSORS:
        raise InvalidRequestError(f"{name}: at most {MAX_PROCESSORS} are allowed.", param=name)
    if specs and not info.supports_processors:
        raise UnsupportedError(f"{name}: this model's engine has none.", param=name)
    installed = processor_names() if specs else []
    for spec in specs:
        if spec.qualname not in installed:
            there = ", ".join(installed) or "none"
            raise InvalidRequestError(f"{name}: one is not installed. There are: {there}.", param=name)
    return tuple(ProcessorCall(spec.qualname, spec.kwargs) for spec in specs)
