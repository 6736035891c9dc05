"""A lower bound on the number of a text's tokens, known without tokenizing it: no token stands for more than its own
length.

That holds for BPE whose vocabulary has all bytes, so that no `unk` token stands for many characters, behind steps that
leave nothing out. A text can only have tokens that are made of its own characters, which matters for a text of one kind
of them, such as digits.
"""

from __future__ import annotations

import tokenizers

from ..token_table import byte_alphabet
from .pipeline import steps_of

_PART = 65536
"""Characters looked at in one call, which does not let other threads run."""


class LongestToken:
    def __init__(self, tokens: list[str], of_bytes: bool, composes: bool, brought_in: str) -> None:
        """`of_bytes`: tokens are in the alphabet that stands for bytes; `composes`: texts become shorter by
        normalization (NFC); `brought_in`: characters that tokens have and the text need not have, such as a word's
        first space."""
        self._tokens = sorted(tokens, key=len, reverse=True)
        self.most = len(self._tokens[0])
        """Length of the longest."""
        self._of_bytes = of_bytes
        self._composes = composes
        self._brought_in = brought_in

    def fewest_tokens(self, text: str) -> int:
        """A lower bound. Raises UnicodeEncodeError for text that is not valid Unicode."""
        if not self._of_bytes:
            return self._fewest(len(text), _chars_of(text))
        if self._composes and not text.isascii():
            # In UTF-8 NFC makes at best three bytes one: the Kelvin sign becomes K, nine bytes of Hangul three.
            return -(-len(text.encode()) // (3 * self.most))
        data = text.encode()
        return self._fewest(len(data), {_BYTE_CHARS[byte] for byte in _bytes_of(data)})

    def _fewest(self, length: int, chars: set[str]) -> int:
        chars = chars.union(self._brought_in)
        longest = next((len(token) for token in self._tokens if chars.issuperset(token)), 1)
        return -(-length // max(1, longest))


_BYTE_CHARS = {byte: char for char, byte in byte_alphabet().items()}


def read_longest_token(backend: tokenizers.Tokenizer) -> LongestToken | None:
    """None where a token can stand for any length of text."""
    model, added = backend.model, list(backend.get_added_tokens_decoder().values())
    if not isinstance(model, tokenizers.models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if any(token.lstrip or token.rstrip for token in added):  # these stand for any number of spaces, too
        return None
    vocab = list(backend.get_vocab(with_added_tokens=False))
    contents = [token.content for token in added]
    if _is_byte_level(backend) and set(_BYTE_CHARS.values()) <= set(vocab):
        if backend.normalizer is not None:
            contents += [backend.normalizer.normalize_str(content) for content in contents]
        tokens = vocab + ["".join(_BYTE_CHARS[byte] for byte in content.encode()) for content in contents]
        return LongestToken(tokens, of_bytes=True, composes=backend.normalizer is not None, brought_in=_BYTE_CHARS[32])
    brought_in = _brought_in(backend)
    if brought_in is not None and model.byte_fallback and {f"<0x{byte:02X}>" for byte in range(256)} <= set(vocab):
        return LongestToken(vocab + contents, of_bytes=False, composes=False, brought_in=brought_in)
    return None


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    *splits, last = steps_of(backend.pre_tokenizer, "pretokenizers") or [{"type": ""}]
    normalizers = [step["type"] for step in steps_of(backend.normalizer, "normalizers")]
    return last["type"] == "ByteLevel" and all(map(_keeps_all, splits)) and normalizers in ([], ["NFC"])


def _keeps_all(split: dict[str, object]) -> bool:
    return split["type"] == "Digits" or (split["type"] == "Split" and split["behavior"] != "Removed")


def _brought_in(backend: tokenizers.Tokenizer) -> str | None:
    """The characters that the normalizer puts in for others, or before a text; None where it could shorten a text."""
    steps = steps_of(backend.pre_tokenizer, "pretokenizers")
    if not all(step["type"] == "Metaspace" or _keeps_all(step) for step in steps):
        return None
    texts = "".join(step["replacement"] for step in steps if step["type"] == "Metaspace")
    for step in steps_of(backend.normalizer, "normalizers"):
        match step:
            case {"type": "Prepend", "prepend": str(text)}:
                texts += text
            case {"type": "Replace", "pattern": {"String": str(one)}, "content": str(text)} if len(one) == 1 and text:
                texts += text
            case _:
                return None
    return texts


def _chars_of(text: str) -> set[str]:
    return set().union(*(set(text[at : at + _PART]) for at in range(0, len(text), _PART)))


def _bytes_of(data: bytes) -> set[int]:
    values = set(data[:_PART])
    while rest := data.translate(None, bytes(values)):
        values |= set(rest[:_PART])
    return values
