"""The steps of a tokenizer from a text to the words that its model sees, read from the sections of its
tokenizer.json."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import tokenizers

from .pattern import Pattern, UnknownPattern

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""That of the library's ByteLevel pre-tokenizer."""
_KEEPS_APART = {"NFC", "NFD", "NFKC", "NFKD"}
_POST_PROCESSORS = {"TemplateProcessing", "BertProcessing", "RobertaProcessing", "ByteLevel"}
"""What puts tokens before and behind those of the text, whatever these are."""


@dataclass(frozen=True)
class Pipeline:
    """One about which something can be proven: the model sees each word by itself, and words end where patterns say."""

    patterns: tuple[Pattern, ...]
    """Each splits what the one before has left."""
    splits_at_spaces: bool
    """Behind the patterns a word ends before every space."""
    adds_space: bool
    """A space comes before each text that does not start with one."""
    composes: bool
    """The normalizer does no more than put characters together (NFC), so that letters stay letters."""


def read_pipeline(backend: tokenizers.Tokenizer) -> Pipeline | None:
    """None where a tokenizer has something that is not understood here."""
    normalizers = steps_of(backend.normalizer, "normalizers")
    names = {step["type"] for step in normalizers}
    wraps = {step["type"] for step in steps_of(backend.post_processor, "processors")}
    if not names <= _KEEPS_APART or not wraps <= _POST_PROCESSORS or _is_random(backend.model):
        return None
    *splits, last = steps_of(backend.pre_tokenizer, "pretokenizers") or [{}]
    patterns = [_pattern(step) for step in splits]
    metaspace = last.get("type") == "Metaspace"
    if metaspace:
        if not last.get("split", True):
            return None
    elif last.get("type") != "ByteLevel":
        patterns.append(_pattern(last))
    elif last.get("use_regex", True):
        patterns.append(_judged(_GPT2))
    known = [pattern for pattern in patterns if pattern is not None]
    if len(known) < len(patterns):
        return None
    adds_space = metaspace or (last.get("type") == "ByteLevel" and last["add_prefix_space"])
    return Pipeline(tuple(known), metaspace, adds_space, composes=names <= {"NFC"})


def steps_of(component: Any, sequence: str) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or post-processor; a sequence of sequences as one. `sequence` is the
    name of the field that holds its parts."""
    # The pickled state of a component is its section of tokenizer.json.
    return [] if component is None else _flat(json.loads(component.__getstate__()), sequence)


def _flat(step: dict[str, Any], sequence: str) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step[sequence] for inner in _flat(part, sequence)]


def _is_random(model: Any) -> bool:
    """Models that draw lots split the same text differently each time."""
    return bool(getattr(model, "dropout", None)) or getattr(model, "alpha", None) is not None


def _pattern(step: dict[str, Any]) -> Pattern | None:
    match step:
        case {"type": "Split", "pattern": {"Regex": source}, "behavior": "Isolated" | "Removed"}:
            return _judged(source)
        case {"type": "Split", "pattern": {"String": text}, "behavior": "Isolated" | "Removed"}:
            return _judged(re.escape(text))
        case {"type": "Digits", "individual_digits": alone}:
            return _judged(r"\p{N}" if alone else r"\p{N}+")
    return None


def _judged(source: str) -> Pattern | None:
    try:
        return Pattern(source)
    except UnknownPattern:
        return None
