"""Custom batching: what a batchstrategy.py decides, and what it costs others when it goes wrong."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.classic.base import InstanceContext
from penstock.classic.batching import custom
from penstock.classic.batching.batch import UnaryCall
from penstock.classic.batching.custom import CustomBatcher, CustomStrategy, StrategyError, waiting_request
from penstock.classic.loading import ClassicModel, load_model
from penstock.classic.messages import InferRequest, WaitingRequest
from penstock.classic.model_config import config_dict
from penstock.classic.tensors import Tensor
from penstock.engines.errors import EngineError
from support.backends import model_context
from support.classic import FunctionBackend, Gate, check_books, echo_request, model_config, output, until

CONFIG = """
    name: "m" backend: "test" max_batch_size: 8 dynamic_batching { }
    input { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] }
    output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] }
    parameters { key: "most" value { string_value: "5" } }
"""


class BatchStrategy:
    """Requests whose parameter `weight` together is at most the model's parameter `most`."""

    def __init__(self, config):  # type: ignore[no-untyped-def]
        self.most = int(config["parameters"]["most"]["string_value"])

    def start(self):  # type: ignore[no-untyped-def]
        return {"room": self.most}

    def include(self, batch, request):  # type: ignore[no-untyped-def]
        weight = request.parameters.get("weight", 1)
        if weight == "raise":
            raise KeyError("what is this")
        if weight == "exit":
            raise SystemExit(3)
        if weight == "mute":
            raise type("Mute", (BaseException,), {"__str__": lambda self: 1 / 0})
        if weight == "file":
            raise FileNotFoundError(2, "no such file", "/nowhere/at/all")
        batch["room"] -= weight
        return batch["room"] >= 0


BY_WEIGHT = inspect.getsource(BatchStrategy)


async def test_what_is_refused_makes_the_batch_before_it_go_at_once() -> None:
    """And a first request that no batch has room for, too: nothing would be won by waiting."""
    config = model_config(CONFIG)
    config.dynamic_batching.max_queue_delay_microseconds = 100
    batcher = CustomBatcher(config, by_weight(), pytest.fail)
    calls = [call(weighing(weight)) for weight in (2, 3, 9, 1)]
    for each in calls:
        batcher.add(each, 0)
    assert batcher.take(0) == calls[:2]
    assert batcher.take(0) == calls[2:3]
    assert batcher.take(0) == []
    assert batcher.delay_ends == 100_000


async def test_failures_wait_for_no_delay(tmp_path: Path) -> None:
    """The rest of the queue waits for its delay, and is not forgotten."""
    failed = []
    config = model_config(CONFIG)
    config.dynamic_batching.max_queue_delay_microseconds = 100
    batcher = CustomBatcher(config, by_weight(), lambda call, error: failed.append(batcher.remove(call)))
    calls = [call(weighing(weight)) for weight in ("raise", 1, "raise")]
    for each in calls:
        batcher.add(each, 0)
    assert batcher.take(0) == []
    assert failed == [True, True]
    assert batcher.delay_ends == 100_000
    assert batcher.take(100_000) == [calls[1]]


def by_weight() -> CustomStrategy:
    return CustomStrategy(BatchStrategy(config_dict(model_config(CONFIG))), "m", "")


def call(request: InferRequest) -> UnaryCall:
    return UnaryCall(request, 1, asyncio.get_running_loop().create_future())


@given(st.lists(st.sampled_from([0, 1, 2, 5, 6, 9, "raise"]), max_size=30))
async def test_every_request_leaves_the_queue_once(weights: list[Any]) -> None:
    """In order, in batches that the strategy allows, whatever it makes of them."""
    ended: list[UnaryCall] = []

    def fail(one: UnaryCall, error: Any) -> None:
        assert batcher.remove(one)
        ended.append(one)

    batcher = CustomBatcher(model_config(CONFIG), by_weight(), fail)  # type: ignore[arg-type]
    calls = [call(weighing(weight)) for weight in weights]
    for each in calls:
        batcher.add(each, 0)
    taken: list[UnaryCall] = []
    while batcher:
        batch = batcher.take(0)
        assert batch or not batcher
        found = [one.request.parameters["weight"] for one in batch]
        assert len(batch) == 1 or sum(found) <= 5
        taken += batch
    assert taken == [one for one, weight in zip(calls, weights, strict=True) if weight != "raise"]
    assert ended == [one for one, weight in zip(calls, weights, strict=True) if weight == "raise"]


@asynccontextmanager
async def served(folder: Path, code: str = BY_WEIGHT, execute: Any = None) -> AsyncIterator[ClassicModel]:
    (folder / "1").mkdir(exist_ok=True)
    (folder / "batchstrategy.py").write_text(code)
    function = execute or Gate()
    model = await load_model(
        model_context(model_config(CONFIG), folder / "1"), FunctionBackend(lambda context: function)
    )
    try:
        yield model
    finally:
        await model.stop()


def weighing(weight: Any, value: int = 0) -> InferRequest:
    return echo_request(value, parameters={"weight": weight})


async def batches(folder: Path, weights: Sequence[Any]) -> list[list[int]]:
    """The numbers of the requests in each batch; the first batch is formed of what came before it."""
    gate = Gate()
    gate.open.set()
    async with served(folder, execute=gate) as model:
        await asyncio.gather(*(model.infer(weighing(weight, n)) for n, weight in enumerate(weights)))
    return gate.batches


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1] * 7, [[0, 1, 2, 3, 4], [5, 6]]),
        ([3, 2, 1], [[0, 1], [2]]),
        ([1, 9, 1], [[0], [1], [2]]),  # what no batch has room for goes alone
        ([0] * 9, [[0, 1, 2, 3, 4, 5, 6, 7], [8]]),  # max_batch_size holds besides
    ],
)
async def test_requests_join_while_the_strategy_says_so(
    tmp_path: Path, weights: list[int], expected: list[list[int]]
) -> None:
    assert await batches(tmp_path, weights) == expected


@pytest.mark.parametrize("weight", ["raise", "exit", "mute", "file"])
async def test_what_it_raises_ends_one_request_and_no_other(tmp_path: Path, weight: str) -> None:
    gate = Gate()
    gate.open.set()
    async with served(tmp_path, execute=gate) as model:
        weights = [1, weight, 1, weight, 1]
        requests = [model.infer(weighing(each, n)) for n, each in enumerate(weights)]
        answers = await asyncio.gather(*requests, return_exceptions=True)
        assert gate.batches == [[0, 2, 4]]
        assert [output(answers[n]).item() for n in (0, 2, 4)] == [0, 2, 4]
        for n in (1, 3):
            assert isinstance(answers[n], EngineError)
            assert "the custom batching of model 'm' failed: " in str(answers[n])
            assert "/nowhere" not in str(answers[n])
        check_books(model, 5)
        assert model.statistics.failures == {"OTHER": 2}


async def test_a_queue_of_nothing_but_failures_is_emptied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with served(tmp_path) as model:
        requests = [model.infer(weighing("raise")) for _ in range(20)]
        answers = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 20)
        assert all(isinstance(answer, StrategyError) for answer in answers)
        check_books(model, 20)
    [logged] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert logged.message == "the custom batching of model 'm' failed for 20 requests"
    assert "KeyError: 'what is this'" in (logged.exc_text or "")


class Recorded:
    """All methods, and what they were called with."""

    def __init__(self, *, fails: str = "") -> None:
        self.fails = fails
        self.told: list[Any] = []

    def _note(self, name: str, *what: Any) -> None:
        self.told.append((name, *what))
        if self.fails == name:
            raise RuntimeError(f"{name} failed")

    def start(self) -> str:
        self._note("start")
        return "the batch"

    def include(self, batch: Any, request: WaitingRequest) -> int:
        self._note("include", batch, request.id)
        return len(self.told) < 4

    def finish(self, batch: Any) -> None:
        self._note("finish", batch)

    def close(self) -> None:
        self._note("close")


def asked(strategy: Recorded, *ids: str) -> list[Any]:
    """What becomes of requests of one batch."""
    of = CustomStrategy(strategy, "m", "")
    of.begin()
    found: list[Any] = []
    for id in ids:
        try:
            found.append(of.joins(waiting_request(echo_request(0, id=id), 1)))
        except StrategyError as error:
            found.append(error.message)
    of.end()
    of.close()
    return found


def test_a_batch_begins_with_its_first_request_and_ends_once() -> None:
    strategy = Recorded()
    assert asked(strategy, "a", "b", "c") == [True, True, False]
    assert strategy.told == [
        ("start",),
        ("include", "the batch", "a"),
        ("include", "the batch", "b"),
        ("include", "the batch", "c"),
        ("finish", "the batch"),
        ("close",),
    ]
    nobody = Recorded()
    assert asked(nobody) == []
    assert nobody.told == [("close",)]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("start", ["the custom batching of model 'm' failed: RuntimeError: start failed"] * 2),
        ("include", ["the custom batching of model 'm' failed: RuntimeError: include failed"] * 2),
        ("finish", [True, True]),
        ("close", [True, True]),
    ],
)
def test_each_method_may_fail(method: str, expected: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    assert asked(Recorded(fails=method), "a", "b") == expected
    logged = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert logged == ([f"{method}() of the custom batching of model 'm' failed"] if expected[0] is True else [])


def test_what_a_strategy_sees_of_a_request() -> None:
    strings = np.array([[b"ab", b""]], np.object_)
    inputs = {"S": Tensor("S", "BYTES", strings), "N": Tensor("N", "FP16", np.zeros((1, 3), np.float16))}
    seen = waiting_request(InferRequest(inputs=inputs, id="7", priority=2, parameters={"a": 1}), 1)
    assert [(name, each.datatype, each.shape, each.byte_size) for name, each in seen.inputs.items()] == [
        ("S", "BYTES", (1, 2), 10),
        ("N", "FP16", (1, 3), 6),
    ]
    assert (seen.batch_size, seen.id, seen.priority, dict(seen.parameters)) == (1, "7", 2, {"a": 1})
    with pytest.raises(TypeError):
        seen.parameters["a"] = 2  # type: ignore[index]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit(1)", "SystemExit: 1"),
        ("x = 1", "TypeError: it has no class BatchStrategy"),
        ("class BatchStrategy:\n    pass", "TypeError: BatchStrategy"),
        ("class BatchStrategy:\n    def __init__(self, config): pass", "has no method include"),
    ],
)
async def test_a_file_that_cannot_be_used_is_refused_when_the_model_loads(tmp_path: Path, code: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        async with served(tmp_path, code):
            pass
    assert not any(name.startswith("_penstock_batchstrategy") for name in sys.modules)


async def test_it_is_closed_with_its_model_and_when_its_model_does_not_load(tmp_path: Path) -> None:
    code = BY_WEIGHT + f"\n    def close(self):\n        open({str(tmp_path / 'closed')!r}, 'a').write('x')\n"
    async with served(tmp_path, code):
        assert not (tmp_path / "closed").exists()
    assert (tmp_path / "closed").read_text() == "x"

    def broken(context: InstanceContext) -> Any:
        raise ValueError("no instance")

    with pytest.raises(ValueError, match="no instance"):
        await load_model(model_context(model_config(CONFIG), tmp_path / "1"), FunctionBackend(broken))
    assert (tmp_path / "closed").read_text() == "xx"
    assert {path.name for path in tmp_path.iterdir()} == {"1", "batchstrategy.py", "closed"}, "left in the repository"


async def test_one_that_takes_long_is_told_of_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom, "SLOW_NS", -1)
    gate = Gate()
    gate.open.set()
    async with served(tmp_path, execute=gate) as model:
        for n in range(3):
            await model.infer(weighing(n))
    warnings = [record.message for record in caplog.records if "held up the whole server" in record.message]
    assert len(warnings) == 1


async def test_a_request_that_is_cancelled_meanwhile_leaves_the_others(tmp_path: Path) -> None:
    gate = Gate()
    async with served(tmp_path, execute=gate) as model:
        first = asyncio.ensure_future(model.infer(weighing(5, 0)))
        await until(lambda: gate.batches == [[0]])
        rest = [asyncio.ensure_future(model.infer(weighing(2, n))) for n in (1, 2, 3)]
        await until(lambda: model.queued == 3)
        rest[1].cancel()
        gate.open.set()
        await asyncio.gather(first, *rest, return_exceptions=True)
        assert gate.batches == [[0], [1, 3]]
        check_books(model, 4)
