"""Many prompts, answered as many at a time as the engine computes together."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from penstock.engines.client.engine import Engine
from penstock.gateway.apis.openai.chat import chat_generation
from penstock.gateway.apis.openai.messages import template_messages
from penstock.gateway.apis.openai.schemas import ChatRequest, CompletionRequest
from penstock.gateway.apis.openai.tools import tool_use
from penstock.gateway.apis.openai.validation import completion_generate_request
from penstock.gateway.apis.pooling.embeddings import embed
from penstock.gateway.apis.pooling.schemas import EmbeddingRequest
from penstock.gateway.commands.offline.outputs import Answer, chat_answer, completion_answer
from penstock.gateway.configuration.config import Config
from penstock.gateway.generating.streams import collect
from penstock.gateway.models.language.dataplane import DataPlane, GenerateRequest, Generation
from penstock.gateway.models.language.model_builder import ModelBuilder
from penstock.gateway.models.language.models import LoadedModel
from penstock.gateway.models.loader import LoadableModel, Model, ModelLoader
from penstock.gateway.models.pooling.model import PoolingModel
from penstock.gateway.models.pooling.plane import PoolingPlane
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.intake import WorkPools
from penstock.gateway.transports.http.settings import AppSettings


class OfflineModel:
    """Loads it, and lets it be asked through the same planes as in a server."""

    def __init__(self, config: Config) -> None:
        self.config = config
        timeout = config.models.scheduling.request_timeout or None
        pool = WorkPools(text_cost=sys.maxsize).text
        self.dataplane = DataPlane(
            request_timeout=timeout, clamp_max_tokens=config.server.clamp_max_tokens, text_pool=pool
        )
        self.pooling = PoolingPlane(self.dataplane.models, request_timeout=timeout, text_pool=pool)
        self._loader = ModelLoader(ModelBuilder(config.server), self.dataplane.models, config.embeddings)
        self._model: Model | None = None

    @property
    def name(self) -> str:
        return "" if self._model is None else self._model.names[0]

    @property
    def makes_vectors(self) -> bool:
        return isinstance(self._model, PoolingModel)

    @property
    def generating(self) -> LoadedModel:
        """A model that generates."""
        assert isinstance(self._model, LoadedModel)
        return self._model

    @property
    def engine(self) -> Engine:
        return self.generating.engine

    async def start(self) -> None:
        """Raises ConfigError, PenstockError."""
        model = await self._loader.fetch(LoadableModel(self.config.models))
        await self._loader.start(model)
        self._model = model

    async def stop(self) -> None:
        if self._model is not None:
            await self._model.stop()


_T = TypeVar("_T")
_R = TypeVar("_R")


class Answering:
    """Lives on the loop; its methods raise PenstockError."""

    def __init__(self, host: OfflineModel) -> None:
        self._host = host
        self._settings = AppSettings(policy=host.config.models.scheduling.policy)
        self._at_once = 2 * host.config.models.scheduling.max_num_seqs
        """Running requests, and as many that wait, so that no step is short of them."""

    async def completions(self, requests: Sequence[CompletionRequest]) -> list[Answer]:
        return await in_order(requests, self._completion, self._at_once)

    async def chats(self, requests: Sequence[ChatRequest]) -> list[Answer]:
        return await in_order(requests, self._chat, self._at_once)

    async def vectors(self, requests: Sequence[EmbeddingRequest]) -> list[npt.NDArray[np.float32]]:
        """Of each request the rows of its texts."""
        return await in_order(requests, self._embed, 2)

    async def completion_generation(self, request: CompletionRequest) -> Generation:
        return await self._host.dataplane.generate(self._completion_request(request))

    async def chat_generation(self, request: ChatRequest) -> Generation:
        return await self._host.dataplane.generate(await self._chat_request(request))

    def _completion_request(self, request: CompletionRequest) -> GenerateRequest:
        model = self._host.dataplane.model(request.model)
        return completion_generate_request(request, model, self._settings, RequestContext())

    async def _chat_request(self, request: ChatRequest) -> GenerateRequest:
        model = self._host.dataplane.model(request.model)
        context = RequestContext()
        messages = template_messages(request.messages, context, model.template_roles, reads_images=model.reads_images)
        return await chat_generation(self._host.dataplane, self._settings, request, messages, context)

    async def _completion(self, request: CompletionRequest) -> Answer:
        generate = self._completion_request(request)
        async with await self._host.dataplane.generate(generate) as generation:
            collected = await collect(generation, generate.n)
        return completion_answer(generate.prompts[0], generation, collected, logprobs=request.logprobs is not None)

    async def _chat(self, request: ChatRequest) -> Answer:
        generate = await self._chat_request(request)
        async with await self._host.dataplane.generate(generate) as generation:
            collected = await collect(generation, generate.n)
        return chat_answer(
            generation,
            collected,
            logprobs=bool(request.logprobs),
            names_tool=tool_use(request, RequestContext()).is_named,
        )

    async def _embed(self, request: EmbeddingRequest) -> npt.NDArray[np.float32]:
        context = RequestContext()
        model = self._host.pooling.model(request.model, context)
        vectors, _ = await embed(self._host.pooling, model, request, context)
        return vectors


async def in_order(items: Sequence[_T], answer: Callable[[_T], Awaitable[_R]], at_once: int) -> list[_R]:
    """The answers in the items' order. The first error ends all of them and is raised."""
    numbered = enumerate(items)
    answers: dict[int, _R] = {}

    async def work() -> None:
        for number, item in numbered:
            answers[number] = await answer(item)

    workers = [asyncio.create_task(work()) for _ in range(min(at_once, len(items)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [answers[number] for number in range(len(answers))]
