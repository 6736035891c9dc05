"""Embedding and ranking models whose numbers a test can foretell."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import support.tokenizers
from penstock.engines.encoder.model_folder import SentenceRecipe
from penstock.engines.encoder.text import EncoderInfo, TokenizedText, Vectors
from penstock.gateway.models.pooling.model import Head, PoolingModel, read_head
from penstock.gateway.models.pooling.plane import PoolingPlane
from penstock.gateway.requests.context import RequestContext
from penstock.tokenizers import Tokenizer
from protocol.fake_dataplane import FakeDataPlane

SIZE = 4


class FakeSource:
    """A row has a text's length, its first and last token, and the sum of its types. A classifier has a part of it."""

    ready = True
    failed = False

    def __init__(self, size: int = SIZE) -> None:
        self.info = EncoderInfo(max_tokens=16, vocab_size=90, output_size=size, runner="fake")
        self.texts: list[TokenizedText] = []
        self.contexts: list[RequestContext] = []
        self.meets: Exception | asyncio.Event | None = None
        """What `rows` meets: an error, or an event to wait for."""
        self.asked = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def rows(self, texts: Sequence[TokenizedText], context: RequestContext) -> Vectors:
        self.texts += texts
        self.contexts.append(context)
        self.asked.set()
        if isinstance(self.meets, Exception):
            raise self.meets
        if self.meets is not None:
            try:
                await self.meets.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        rows = [[len(each), each.ids[0], each.ids[-1], sum(each.types or ())] for each in texts]
        return np.array(rows, np.float32)[:, : self.info.output_size]


class NoMetrics:
    def collect(self) -> tuple[()]:
        return ()


def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(support.tokenizers.save_folder(folder, support.tokenizers.bert()))


def served(
    tokenizer: Tokenizer, name: str, source: FakeSource, head: Head | None = None, **fields: Any
) -> PoolingModel:
    recipe = fields.pop("recipe", SentenceRecipe(normalize=True))
    return PoolingModel(
        names=(name,),
        root=name,
        source=source,
        tokenizer=tokenizer,
        recipe=recipe,
        head=head,
        metrics=NoMetrics(),
        created=1_700_000_000,
        **{"loaded": True, **fields},
    )


class Setup:
    """A plane with an embedding model `embedder`, a scorer of pairs `scorer`, and a `classifier` of three classes,
    beside a language model `tiny`."""

    def __init__(self, folder: Path, **recipe: Any) -> None:
        self.tokenizer = tokenizer(folder)
        self.embedder, self.scorer, self.classifier = FakeSource(), FakeSource(1), FakeSource(3)
        self.dataplane = FakeDataPlane()
        self.plane = PoolingPlane(self.dataplane.models)
        prompts = {"query": "the ", "document": "a "}
        recipe = {"normalize": True, "prompts": prompts, **recipe}
        models = [
            served(self.tokenizer, "embedder", self.embedder, recipe=SentenceRecipe(**recipe)),
            served(self.tokenizer, "scorer", self.scorer, read_head({}, 1)),
            served(self.tokenizer, "classifier", self.classifier, read_head({"id2label": {"0": "good"}}, 3)),
            served(self.tokenizer, "late", FakeSource(), loaded=False),
        ]
        for model in models:
            self.plane.models.add(model)
