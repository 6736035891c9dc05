"""Texts and vectors: what an encoder takes and gives. Free of OpenVINO: the gateway knows these without loading it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]
"""A row for each text; of models with a vector for each token, a row for each token of each text."""


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text as its model reads it."""

    ids: Sequence[int]
    types: Sequence[int] | None = None
    """Of each token, where the text is a pair; None: all 0."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class EncoderInfo:
    max_tokens: int
    """Of a text, with its special tokens."""
    vocab_size: int
    output_size: int
    """Of a vector, or the number of labels."""
    runner: str
    """What it runs on, in words."""


class Encoder(Protocol):
    """What computes: `EncoderModel`, for one."""

    info: EncoderInfo

    def compute(self, texts: Sequence[TokenizedText]) -> Vectors | list[Vectors]:
        """Of each text its row, or the rows of its tokens."""
        ...
