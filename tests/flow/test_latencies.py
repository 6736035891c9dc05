"""Latencies of single requests reach the observer of a model's statistics: each once, and no warm-up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from penstock.classic.base import Batch, InferModel
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.tensors import Tensor
from penstock.engines.errors import EngineError
from penstock.gateway.models.repository.classic_loader import ClassicLoaders
from penstock.gateway.models.repository.manager import ModelRepository
from penstock.gateway.models.repository.settings import RepositorySettings, build_cache
from penstock.gateway.models.repository.storage import Repository
from support.classic import ECHO, echo_request, model_config, request, served
from support.ensembles import DECOUPLED, X_TO_Y, config_of, count_up, ensemble_of, shelf_with, x_to_y

CONFIG = """
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [1] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [1] }
model_warmup { batch_size: 1 inputs { key: "INPUT0" value { data_type: TYPE_FP32 dims: [1] zero_data: true } } }
response_cache { enable: true }
"""


@dataclass
class Seen:
    """An observer that keeps what it is told."""

    requests: list[tuple[int, ...]] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    misses: list[int] = field(default_factory=list)
    first_responses: list[int] = field(default_factory=list)

    def request(self, total: int, queue: int, compute_input: int, compute_infer: int, compute_output: int) -> None:
        self.requests.append((total, queue, compute_input, compute_infer, compute_output))

    def cache_hit(self, ns: int) -> None:
        self.hits.append(ns)

    def cache_miss(self, ns: int) -> None:
        self.misses.append(ns)

    def first_response(self, ns: int) -> None:
        self.first_responses.append(ns)


def echo(batch: Batch) -> None:
    for call in batch.calls:
        value = call.request.inputs["INPUT0"].array
        if value[0, 0] < 0:
            raise EngineError("negative")
        call.send(InferResponse([Tensor("OUTPUT0", "INT32", value)]))


def count_down(batch: Batch) -> None:
    for call in batch.calls:
        for value in range(int(call.request.inputs["INPUT0"].array[0, 0])):
            call.send(InferResponse([Tensor("OUTPUT0", "INT32", np.array([[value]], np.int32))], final=False))
        call.send(InferResponse(None))


async def test_each_request_of_a_batch_is_observed() -> None:
    async with served(model_config(ECHO, "dynamic_batching {}"), echo) as model:
        seen = model.statistics.observer = Seen()
        await asyncio.gather(*(model.infer(echo_request(value)) for value in range(3)))
        with pytest.raises(EngineError):
            await model.infer(echo_request(-1))
        statistics = model.statistics
        sums = (statistics.success, statistics.queue, statistics.compute_input, statistics.compute_infer)
        assert len(seen.requests) == 3
        assert [sum(column) for column in zip(*seen.requests, strict=True)][:4] == [each.ns for each in sums]
        assert seen.first_responses == []


async def test_only_the_first_response_of_a_request_is_observed() -> None:
    async with served(model_config(ECHO, "model_transaction_policy { decoupled: true }"), count_down) as model:
        seen = model.statistics.observer = Seen()
        for count in (3, 0):
            assert len([response async for response in model.stream(echo_request(count))]) == count + 1
        assert len(seen.first_responses) == len(seen.requests) == 2
        assert 0 < seen.first_responses[0] <= seen.requests[0][0]


def refuse(batch: Batch) -> None:
    raise EngineError("broken")


async def test_ensembles_are_observed_as_other_models_are() -> None:
    counting = (count_up, config_of("count", X_TO_Y, DECOUPLED))
    async with shelf_with(count=counting, bad=refuse) as shelf:
        model = ensemble_of(shelf, x_to_y("count", "X", "Y"))
        seen = model.statistics.observer = Seen()
        for value in (2, 0):
            assert [response.final async for response in model.stream(request(X=[[value]]))][-1]
        found = model.statistics
        assert (len(seen.first_responses), len(seen.requests)) == (2, 2)
        sums = (found.success, found.queue, found.compute_input, found.compute_infer, found.compute_output)
        assert [sum(column) for column in zip(*seen.requests, strict=True)] == [each.ns for each in sums]
        broken = ensemble_of(shelf, x_to_y("bad", "X", "Y"), name="broken")
        seen = broken.statistics.observer = Seen()
        assert [response.error is None async for response in broken.stream(request(X=[[1]]))] == [False]
        assert (len(seen.first_responses), len(seen.requests)) == (1, 0)


async def test_models_of_a_repository_are_observed_after_their_warm_up(tmp_path: Path) -> None:
    (tmp_path / "echo/1").mkdir(parents=True)
    (tmp_path / "echo/config.pbtxt").write_text(CONFIG)
    seen = Seen()

    def observe(model: InferModel) -> None:
        model.statistics.observer = seen

    cache = build_cache(("local,size=100000",), 0)
    repositories = [Repository(str(tmp_path))]
    manager = ModelRepository(RepositorySettings(), ClassicLoaders({}), repositories, cache=cache, observe=observe)
    try:
        await manager.start()
        assert seen == Seen()
        array = np.ones((1, 1), np.float32)
        for _ in range(2):
            await manager.model("echo").infer(InferRequest(inputs={"INPUT0": Tensor("INPUT0", "FP32", array)}))
        assert (len(seen.requests), len(seen.hits), len(seen.misses)) == (1, 1, 1)
    finally:
        await manager.stop()
