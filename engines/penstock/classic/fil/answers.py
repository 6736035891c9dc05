"""What clients get of a forest's scores: themselves, classes, or a probability for each class."""

from __future__ import annotations

import numpy as np

from penstock.classic.fil.forest import Forest
from penstock.classic.fil.settings import FilSettings
from penstock.classic.tensors import Array


class Answers:
    """The rules are those of Triton's backend."""

    def __init__(self, forest: Forest, settings: FilSettings) -> None:
        self._forest = forest
        self._settings = settings
        self.outputs = forest.scores(np.full((1, forest.features), np.nan, np.float32)).shape[1]
        """Of the forest: 1 for regression and for binary classifiers."""

    def width(self, wanted: int) -> int:
        """How many numbers the answer for a row has. A binary classifier has one probability or, if 2 are `wanted`,
        that of each class."""
        if self._settings.answers_class:
            return 1
        if self.outputs == 1 and self._settings.probabilities:
            return wanted
        return self.outputs

    def of(self, rows: Array, width: int) -> Array:
        """FP32 [rows, width]."""
        scores = self._forest.scores(rows)
        if self._settings.answers_class:
            if self.outputs > 1:
                return scores.argmax(axis=1, keepdims=True).astype(np.float32)
            return (scores > self._settings.threshold).astype(np.float32)
        if width == 2 and self.outputs == 1:
            return np.concatenate([1 - scores, scores], axis=1)
        return scores
