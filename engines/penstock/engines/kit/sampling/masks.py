"""From bits to lists: which tokens of the vocabulary a request may have next."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
BitMasks = npt.NDArray[np.int32]

_BITS = 32
"""Of a word."""


class TokenMask(NamedTuple):
    """Some of the vocabulary, by the shorter of two lists."""

    ids: Ids
    """Ascending."""
    allowed: bool
    """These and no others are allowed; else all but these."""


def bit_masks(count: int, vocab_size: int) -> BitMasks:
    """[count, ceil(vocab / 32)], not filled: bit i of word w says whether token 32 * w + i is allowed."""
    return np.empty((count, -(-vocab_size // _BITS)), np.int32)


def shorter_lists(masks: BitMasks, vocab_size: int) -> list[TokenMask]:
    """Of each row of `masks`, which is changed. All rows at once, and only words with a bit that is listed are looked
    at bit by bit: for most masks these are few."""
    bits_beyond = -vocab_size % _BITS
    words = masks.view(np.uint32)
    if bits_beyond:
        words[:, -1] &= np.uint32(0xFFFFFFFF >> bits_beyond)
    counts = np.bitwise_count(words).sum(axis=1, dtype=np.int64)
    allowed = counts <= vocab_size // 2
    if not allowed.all():
        forbids = np.flatnonzero(~allowed)
        words[forbids] = ~words[forbids]
        if bits_beyond:
            words[:, -1] &= np.uint32(0xFFFFFFFF >> bits_beyond)
        counts[forbids] = vocab_size - counts[forbids]
    listed = np.flatnonzero(words.reshape(-1) != 0)
    bits = np.unpackbits(words.reshape(-1)[listed].view(np.uint8), bitorder="little")
    places = np.flatnonzero(bits.view(np.bool_))
    firsts = listed % words.shape[1] * _BITS
    ids = firsts[places >> 5] + (places & 31)
    ends = counts.cumsum().tolist()
    starts = [0, *ends[:-1]]
    spans = zip(starts, ends, allowed.tolist(), strict=True)
    return [TokenMask(ids[start:end], is_allowed) for start, end, is_allowed in spans]
