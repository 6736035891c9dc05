"""What the logits of a sequence classification model mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.engines.encoder.text import Vectors
from penstock.engines.errors import UnsupportedError


def _sigmoid(x: Vectors) -> Vectors:
    # exp of the negative side only, which cannot overflow
    small = np.exp(-np.abs(x))
    found: Vectors = np.where(x >= 0, 1, small) / (1 + small)
    return found


def _softmax(x: Vectors) -> Vectors:
    parts: Vectors = np.exp(x - x.max(axis=1, keepdims=True))
    parts /= parts.sum(axis=1, keepdims=True)
    return parts


_ACTIVATIONS: Mapping[str, Callable[[Vectors], Vectors]] = {
    "Sigmoid": _sigmoid,
    "Softmax": _softmax,
    "Identity": lambda x: x,
}
"""By the last part of torch's name."""


@dataclass(frozen=True, slots=True)
class Head:
    labels: tuple[str, ...]
    activate: Callable[[Vectors], Vectors]
    """From logits to what is answered."""


def read_head(settings: Mapping[str, Any], num_labels: int) -> Head:
    """`settings` is config.json. The activation is the one that sentence-transformers has noted there, else that of
    transformers' `problem_type`, else by the number of labels. Raises UnsupportedError."""
    return Head(_labels(settings, num_labels), _ACTIVATIONS[_activation(settings, num_labels)])


def _labels(settings: Mapping[str, Any], count: int) -> tuple[str, ...]:
    given = settings.get("id2label")
    known = given if isinstance(given, Mapping) else {}
    return tuple(str(known.get(str(i), f"LABEL_{i}")) for i in range(count))


def _activation(settings: Mapping[str, Any], num_labels: int) -> str:
    noted = settings.get("sentence_transformers")
    name = noted.get("activation_fn") if isinstance(noted, Mapping) else None
    name = name or settings.get("sbert_ce_default_activation_function")
    if name:
        short = str(name).rpartition(".")[2]
        if short not in _ACTIVATIONS:
            raise UnsupportedError(f"config.json has the activation {name}; supported are {', '.join(_ACTIVATIONS)}")
        return short
    problem = settings.get("problem_type")
    if problem == "regression":
        return "Identity"
    return "Sigmoid" if num_labels == 1 or problem == "multi_label_classification" else "Softmax"
