"""A served embedding or ranking model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from penstock.engines.encoder.model_folder import SentenceRecipe
from penstock.engines.encoder.text import EncoderInfo, TokenizedText, Vectors
from penstock.engines.errors import UnsupportedError
from penstock.gateway.metrics.registry import Source
from penstock.gateway.requests.context import RequestContext
from penstock.tokenizers import Tokenizer


def _sigmoid(x: Vectors) -> Vectors:
    # exp of the negative side only, which cannot overflow
    small = np.exp(-np.abs(x))
    values: Vectors = np.where(x >= 0, 1, small) / (1 + small)
    return values


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
    labels = settings.get("id2label")
    known = labels if isinstance(labels, Mapping) else {}
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


class RowSource(Protocol):
    """What computes. Lives on the event loop."""

    @property
    def info(self) -> EncoderInfo:
        """Raises NotReadyError before it has been loaded."""
        ...

    @property
    def ready(self) -> bool:
        """True while requests would be served now."""
        ...

    @property
    def failed(self) -> bool:
        """True when it is down and will not come back by itself."""
        ...

    async def start(self) -> None:
        """Returns when it can serve. Raises PenstockError."""
        ...

    async def rows(self, texts: Sequence[TokenizedText], context: RequestContext) -> Vectors:
        """A row for each text, none of which is empty: a vector as the model gives it, or logits. For the task
        token_embed a row for each token. Cancelling gives up
        what is not computed yet. Raises PenstockError."""
        ...

    async def stop(self) -> None: ...


@dataclass(slots=True, eq=False, kw_only=True)
class PoolingModel:
    names: tuple[str, ...]
    root: str
    """The folder's name or the hub id it came from."""
    folder: str = ""
    """Where its files are."""
    source: RowSource
    tokenizer: Tokenizer
    recipe: SentenceRecipe
    head: Head | None
    """Of a model that classifies or scores; None: it gives vectors."""
    dimensions: tuple[int, ...] = ()
    """Shorter lengths that its vectors were trained for; empty: it does not say."""
    metrics: Source
    created: int = field(default_factory=lambda: int(time.time()))
    loaded: bool = False

    async def start(self) -> None:
        """As `RowSource.start`."""
        await self.source.start()

    async def stop(self) -> None:
        await self.source.stop()

    @property
    def capabilities(self) -> list[str]:
        """A head with one class gives a score, by which texts are ranked."""
        if self.head is None:
            return ["embedding" if self.recipe.pooling else "token_embedding"]
        return ["classify", "score", "rerank"] if len(self.head.labels) == 1 else ["classify"]

    @property
    def task(self) -> Literal["embed", "token_embed", "classify"]:
        """vLLM's name of what it gives: a vector for each text or token, or logits."""
        if self.head is not None:
            return "classify"
        return "embed" if self.recipe.pooling else "token_embed"
