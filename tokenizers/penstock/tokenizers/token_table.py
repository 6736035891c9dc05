"""A table of what each token id contributes to decoded text, worked out once per tokenizer from its decoder.

The rules are those of the decoders of Hugging Face's `tokenizers` library, read from the `decoder` section of
tokenizer.json. Decoders that are not one of the three families below get no table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


class DecoderKind(Enum):
    """How the texts of tokens become one text."""

    BYTES = auto()
    """Each token is a run of bytes; their concatenation is read as UTF-8 (ByteLevel: GPT-2, Llama 3, Qwen)."""
    BYTE_RUNS = auto()
    """Tokens are text, but `<0x..>` tokens are bytes, and a run of those is read as UTF-8 (Llama 2, Gemma)."""
    PIECES = auto()
    """Tokens are text; the first one loses its word-start marks (Metaspace: T5, XLNet)."""
    GENERAL = auto()
    """Anything else: only the library itself knows."""


@dataclass(frozen=True)
class TokenTable:
    """`texts` has every id whose contribution is text of its own; ids in no mapping contribute nothing."""

    family: DecoderKind
    texts: dict[int, str] = field(default_factory=dict)
    partial: dict[int, bytes] = field(default_factory=dict)
    """Contributions that are not text of their own: BYTES tokens with incomplete UTF-8, BYTE_RUNS byte tokens."""
    first_texts: Callable[[int], str] | None = None
    """PIECES: what an id contributes as the first token, where that differs."""
    strip_char: str = ""
    strip_count: int = 0
    """BYTE_RUNS: up to this many `strip_char` are dropped at the very start of the text."""

    def without(self, ids: Iterable[int]) -> TokenTable:
        """The same table in which `ids` contribute nothing (special tokens that are skipped)."""
        texts, partial = dict(self.texts), dict(self.partial)
        for token_id in ids:
            texts.pop(token_id, None)
            partial.pop(token_id, None)
        return TokenTable(self.family, texts, partial, self.first_texts, self.strip_char, self.strip_count)


def build_token_table(decoder: dict[str, Any] | None, tokens: dict[int, str]) -> TokenTable:
    """`decoder` is that section of tokenizer.json, `tokens` maps each id to its token as the vocabulary writes it."""
    match _steps(decoder):
        case [{"type": "ByteLevel"}]:
            return _byte_level_table(tokens)
        case [{"type": "Metaspace"} as step]:
            return _metaspace_table(step, tokens)
        case steps:
            return _byte_fallback_table(steps, tokens) or TokenTable(DecoderKind.GENERAL)


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", ()) for step in _steps(inner)]
    return [decoder]


def _byte_level_table(tokens: dict[int, str]) -> TokenTable:
    alphabet = byte_alphabet()
    # Characters below 256 that stand for no byte must not slip through latin-1; any character above 255 will do.
    to_latin1 = dict.fromkeys(range(256), "\uffff") | {ord(char): chr(byte) for char, byte in alphabet.items()}
    texts, partial = {}, {}
    for token_id, token in tokens.items():
        try:
            data = token.translate(to_latin1).encode("latin-1")
        except UnicodeEncodeError:
            # One character outside the alphabet and the whole token stands for itself.
            texts[token_id] = token
            continue
        try:
            texts[token_id] = data.decode("utf-8")
        except UnicodeDecodeError:
            partial[token_id] = data
    return TokenTable(DecoderKind.BYTES, texts, partial)


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE vocabularies (defined by GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}


def _metaspace_table(step: dict[str, Any], tokens: dict[int, str]) -> TokenTable:
    mark = step.get("replacement", "▁")
    texts = {token_id: token.replace(mark, " ") for token_id, token in tokens.items()}
    scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")

    def first_text(token_id: int) -> str:
        return tokens.get(token_id, "").replace(mark, "")

    return TokenTable(DecoderKind.PIECES, texts, first_texts=None if scheme == "never" else first_text)


def _byte_fallback_table(steps: list[dict[str, Any]], tokens: dict[int, str]) -> TokenTable | None:
    """Replace (of plain strings)*, ByteFallback, Fuse?, Strip (at the start, after Fuse)?; None for anything else."""
    kinds = [step.get("type") for step in steps]
    replaces = 0
    while replaces < len(kinds) and kinds[replaces] == "Replace":
        replaces += 1
    if kinds[replaces:] not in (["ByteFallback"], ["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]):
        return None
    rules = []
    for step in steps[:replaces]:
        pattern = step["pattern"].get("String")
        if not pattern:
            return None
        rules.append((pattern, step["content"]))
    strip = steps[-1] if kinds[-1] == "Strip" else {}
    if strip.get("stop", 0):
        return None
    texts, partial = {}, {}
    for token_id, token in tokens.items():
        for pattern, content in rules:
            token = token.replace(pattern, content)
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte:
            partial[token_id] = bytes((int(byte[1], 16),))
        else:
            texts[token_id] = token
    return TokenTable(
        DecoderKind.BYTE_RUNS,
        texts,
        partial,
        strip_char=strip.get("content", ""),
        strip_count=strip.get("start", 0),
    )
