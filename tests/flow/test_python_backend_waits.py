"""Models that wait for other models: what they pass on, what ends with them, and what would never end."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.classic.base import Batch
from penstock.classic.messages import InferRequest
from penstock.classic.python.host_calls import Followers
from penstock.engines.errors import PenstockError
from support.classic import model_config, served, until
from support.python_backend import CPU, FakeHost, loaded, outputs, request

CONFIG = f"""
max_batch_size: 0
input [ {{ name: "X" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_STRING dims: [ 1 ] }} ]
{CPU}
"""
ASKING = """
import asyncio
def text(value): return np.array([str(value).encode()], np.object_)
def ask(path, **more):
    name, _, rest = path.partition(" ")
    inputs = [pb_utils.Tensor("X", text(rest))]
    return pb_utils.InferenceRequest(model_name=name, requested_output_names=["Y"], inputs=inputs, **more)
def shown(response):
    if response.has_error(): return response.error().message()
    return response.output_tensors()[0].as_numpy()[0].decode()
"""
FOLLOWS = f"""{ASKING}
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for r in requests:
            path = r.inputs()[0].as_numpy()[0].decode()
            said = shown(ask(path).exec()) if path else "end"
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", text(said))]))
        return found
"""
"""Asks the model that is named first, about the rest."""
IMPATIENT = f"""{ASKING}
class TritonPythonModel:
    async def execute(self, requests):
        try:
            await asyncio.wait_for(ask("held").async_exec(), 0.05)
        except asyncio.TimeoutError:
            said = shown(await ask("quick").async_exec())
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", text(said))]) for _ in requests]
"""
FUNCTION = """
    backend: "test" max_batch_size: 0
    input { name: "X" data_type: TYPE_STRING dims: [ 1 ] }
    output { name: "Y" data_type: TYPE_STRING dims: [ 1 ] }
"""


def asked(path: str, **more: Any) -> InferRequest:
    return request(X=np.array([path.encode()], np.object_), **more)


async def said(model: Any, path: str) -> str:
    response = await asyncio.wait_for(model.infer(asked(path)), 60)
    return bytes(outputs(response)["Y"][0]).decode()


class Held:
    """A model that answers when its callers have gone, and keeps their requests."""

    def __init__(self) -> None:
        self.requests: list[InferRequest] = []
        self._pause = threading.Event()

    def __call__(self, batch: Batch) -> None:
        self.requests += [call.request for call in batch.calls]
        while not all(call.cancelled for call in batch.calls):
            self._pause.wait(0.001)

    @property
    def config(self) -> Any:
        return model_config(FUNCTION, 'name: "held"')


def answer(batch: Batch) -> None:
    batch.scatter({"Y": batch.gather()["X"]})


async def test_what_waits_for_itself_is_refused(tmp_path: Path) -> None:
    host = FakeHost()
    two = CONFIG.replace("KIND_CPU", "KIND_CPU count: 2")
    async with loaded(tmp_path, FOLLOWS, CONFIG, name="a", host=host) as a:
        assert "all instances of model 'a' wait, directly or through other models" in await said(a, "a")
        async with loaded(tmp_path, FOLLOWS, two, name="b", host=host):
            assert await said(a, "b b") == "end"
            assert "all instances of model 'b' wait" in await said(a, "b b b")
            assert "all instances of model 'a' wait" in await said(a, "b a")
            assert await said(a, "b") == "end"


async def test_a_request_that_is_given_up_ends_those_that_were_made_for_it(tmp_path: Path) -> None:
    host, held = FakeHost(), Held()
    async with (
        served(held.config, held) as inner,
        loaded(tmp_path, FOLLOWS, CONFIG, name="outer", host=host) as outer,
    ):
        host.models["held"] = inner
        made = asked("held", _priority=3, _tenant="t", _deadline=1e12)
        for ask in (outer.infer, lambda request: _first(outer.stream(request))):
            task = asyncio.ensure_future(ask(made))
            await until(lambda: bool(held.requests))
            [seen] = held.requests
            assert (seen.priority, seen.tenant, seen.deadline) == (3, "t", 1e12)
            task.cancel()
            await until(lambda: inner.statistics.failures["CANCELED"] > 0)
            held.requests.clear()
            inner.statistics.failures.clear()
        assert await said(outer, "") == "end"


async def _first(stream: Any) -> None:
    try:
        await stream.__anext__()
    finally:
        stream.close()


async def test_a_deadline_bounds_what_is_asked_for_it(tmp_path: Path) -> None:
    host, held = FakeHost(), Held()
    async with (
        served(held.config, held) as inner,
        loaded(tmp_path, FOLLOWS, CONFIG, name="outer", host=host) as outer,
    ):
        host.models["held"] = inner
        with pytest.raises(PenstockError, match="deadline"):
            await outer.infer(asked("held", _deadline=asyncio.get_running_loop().time() + 0.2))
        assert await said(outer, "") == "end"


async def test_an_awaited_request_that_is_given_up_by_the_model(tmp_path: Path) -> None:
    host, held = FakeHost(), Held()
    async with (
        served(held.config, held) as inner,
        served(model_config(FUNCTION, 'name: "quick"'), answer) as quick,
        loaded(tmp_path, IMPATIENT, CONFIG, name="outer", host=host) as outer,
    ):
        host.models |= {"held": inner, "quick": quick}
        for _ in range(2):
            assert await said(outer, "") == ""
        await until(lambda: inner.statistics.failures["CANCELED"] == 2)


async def test_a_request_is_given_up_only_once_it_has_begun() -> None:
    """Else nothing answers the model, which would wait for ever."""
    answered = []

    async def answers() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            answered.append(True)

    given_up: Any = SimpleNamespace(cancelled=True)
    followers, task = Followers(), asyncio.create_task(answers())
    followers.follow(task, [given_up])
    followers._look()  # its timer is due in the turn of the loop in which the task begins
    await asyncio.wait((task,))
    followers.close()
    assert answered
