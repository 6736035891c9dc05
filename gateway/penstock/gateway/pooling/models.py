"""A served embedding or ranking model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from penstock.engines.encoder.model_folder import SentenceRecipe
from penstock.engines.encoder.text import EncoderInfo, TokenizedText, Vectors
from penstock.gateway.front.context import RequestContext
from penstock.gateway.metrics.registry import Source
from penstock.gateway.pooling.heads import Head
from penstock.tokenizers import Tokenizer


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
