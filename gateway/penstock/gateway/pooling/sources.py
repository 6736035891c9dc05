"""What computes rows: an encoder in this process, or a decoder behind its scheduler."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from penstock.engines.client.engine import Engine
from penstock.engines.contract.messages import AddRequest, PoolingParams, RequestOutput
from penstock.engines.encoder.engine import EncoderEngine
from penstock.engines.encoder.text import EncoderInfo, TokenizedText, Vectors
from penstock.engines.errors import EngineError, UnsupportedError
from penstock.gateway.front.context import RequestContext

_TOGETHER = 128
"""Texts of a call that are with the engine at one time: more would fill its queue."""


class EncoderSource:
    failed = False

    def __init__(self, engine: EncoderEngine) -> None:
        self._engine = engine

    @property
    def info(self) -> EncoderInfo:
        return self._engine.info

    @property
    def ready(self) -> bool:
        return self._engine.ready

    async def start(self) -> None:
        await self._engine.start()

    async def rows(self, texts: Sequence[TokenizedText], context: RequestContext) -> Vectors:
        return await self._engine.encode(texts)

    async def stop(self) -> None:
        await self._engine.stop()


class DecoderSource:
    """The last token's hidden state of a language model, computed in the steps of its scheduler."""

    def __init__(self, engine: Engine, size: int, max_tokens: int | None) -> None:
        """`size` of a vector; `max_tokens`: as sentence-transformers' files say."""
        self._engine = engine
        self._size = size
        self._max_tokens = max_tokens

    @property
    def info(self) -> EncoderInfo:
        info = self._engine.info
        return EncoderInfo(
            max_tokens=min(self._max_tokens or info.context_length, info.context_length),
            vocab_size=info.vocab_size,
            output_size=self._size,
            runner=info.runner,
        )

    @property
    def ready(self) -> bool:
        return self._engine.ready

    @property
    def failed(self) -> bool:
        return self._engine.failed

    async def start(self) -> None:
        await self._engine.start()
        if not self._engine.info.supports_pooling:
            raise UnsupportedError(f"the engine of this model gives no vectors: {self._engine.info.runner}")

    async def rows(self, texts: Sequence[TokenizedText], context: RequestContext) -> Vectors:
        rows: list[list[float]] = []
        for begin in range(0, len(texts), _TOGETHER):
            rows += await self._some(texts[begin : begin + _TOGETHER], context)
        return np.array(rows, np.float32)

    async def _some(self, texts: Sequence[TokenizedText], context: RequestContext) -> list[list[float]]:
        adds = [self._add(text, context) for text in texts]
        found: dict[int, list[float]] = {}
        async with self._engine.submit(adds) as stream:
            async for outputs in stream:
                found |= {output.id: _vector(output) for output in outputs}
        return [found[add.ids[0]] for add in adds]

    def _add(self, text: TokenizedText, context: RequestContext) -> AddRequest:
        return AddRequest(
            ids=self._engine.new_ids(1),
            prompt_token_ids=list(text.ids),
            params=PoolingParams(normalize=False),
            arrival_time=time.monotonic(),
            deadline=context.deadline,
            priority=context.principal.priority,
            background=context.background,
            tenant=context.tenant,
            cache_salt=context.tenant,  # tenants share no cached prefixes, and no caller gives salts here
        )

    async def stop(self) -> None:
        await self._engine.stop()


def _vector(output: RequestOutput) -> list[float]:
    """Raises the error that ended the request."""
    if output.error is not None:
        raise output.error.raised()
    if output.pooled is None:
        raise EngineError("The engine ended a request without its vector.")
    return output.pooled
