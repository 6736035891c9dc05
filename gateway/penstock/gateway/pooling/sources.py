"""An encoder in this process as a RowSource."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engines.encoder.engine import EncoderEngine
from penstock.engines.encoder.text import EncoderInfo, TokenizedText, Vectors
from penstock.gateway.front.context import RequestContext


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
