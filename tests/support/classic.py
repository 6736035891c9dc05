"""Classic models made of a function, for tests of what stands around models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
from google.protobuf import text_format

from penstock.classic.base import (
    AsyncInstance,
    Backend,
    BackendInstance,
    BackendModel,
    Batch,
    Host,
    InstanceContext,
    ModelContext,
)
from penstock.classic.batching.rate_limiter import RateLimiter
from penstock.classic.loading import ClassicModel, load_model
from penstock.classic.messages import InferRequest
from penstock.classic.model_config import ModelConfig
from penstock.classic.tensors import Array, Tensor, datatype_of
from penstock.engines.errors import PenstockError

Execute = Callable[[Batch], None]

ADD_SUB = """
    name: "add_sub" backend: "test" max_batch_size: 32
    input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
    output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
    output { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] }
"""

ECHO = """
    name: "echo" backend: "test" max_batch_size: 8
    input { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] }
    output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] }
"""
"""One INT32 in, the same out."""


def model_config(text: str, *more: str) -> ModelConfig:
    """The configuration written in `text` and `more`."""
    return text_format.Parse("\n".join([text, *more]), ModelConfig())


def request(*, id: str = "", outputs: Sequence[str] = (), **inputs: Any) -> InferRequest:
    """A request with these inputs: arrays, or lists of INT32."""
    tensors = {}
    for name, value in inputs.items():
        array = value if isinstance(value, np.ndarray) else np.array(value, np.int32)
        tensors[name] = Tensor(name, datatype_of(array.dtype), array)
    return InferRequest(inputs=tensors, id=id, outputs=tuple(outputs))


def echo_request(value: int, **fields: Any) -> InferRequest:
    made = request(INPUT0=[[value]])
    for name, field in fields.items():
        setattr(made, name, field)
    return made


def output(response: Any, name: str = "OUTPUT0") -> Array:
    return next(tensor.array for tensor in response.outputs if tensor.name == name)


def echo(batch: Batch) -> None:
    batch.scatter({"OUTPUT0": batch.gather()["INPUT0"]})


class Gate:
    """An `execute` that waits until it is opened, and tells what it was given."""

    def __init__(self, execute: Execute = echo) -> None:
        self._execute = execute
        self.open = threading.Event()
        self.batches: list[list[int]] = []
        """The values of the requests of every batch so far."""

    def __call__(self, batch: Batch) -> None:
        self.batches.append([int(call.request.inputs["INPUT0"].array[0, 0]) for call in batch.calls])
        if not self.open.wait(30):
            raise TimeoutError("the gate has never been opened")
        self._execute(batch)


class FunctionBackend(Backend):
    """Its instances execute one function, or one of its own each: `make(context)` gives it."""

    def __init__(self, make: Callable[[InstanceContext], Execute | AsyncInstance]) -> None:
        super().__init__({})
        self.make = make
        self.loaded: list[InstanceContext] = []
        self.unloaded: list[str] = []

    def load_model(self, context: ModelContext) -> BackendModel:
        return _Model(self)


class _Model(BackendModel):
    def __init__(self, backend: FunctionBackend) -> None:
        self._backend = backend

    def load_instance(self, context: InstanceContext) -> BackendInstance | AsyncInstance:
        made = self._backend.make(context)
        self._backend.loaded.append(context)
        return made if isinstance(made, AsyncInstance) else _Instance(self._backend, context.name, made)

    def unload(self) -> None:
        self._backend.unloaded.append("model")


class _Instance(BackendInstance):
    def __init__(self, backend: FunctionBackend, name: str, execute: Execute) -> None:
        self._backend = backend
        self._name = name
        self._execute = execute

    def execute(self, batch: Batch) -> None:
        self._execute(batch)

    def unload(self) -> None:
        self._backend.unloaded.append(self._name)


class FakeAsyncInstance(AsyncInstance):
    """Runs `execute` on the loop. `up` says whether it is ready; `changed` tells those who wait for that."""

    def __init__(self, execute: Callable[[Batch], Awaitable[None]]) -> None:
        self._execute = execute
        self.up = False
        self.lost: PenstockError | None = None
        self.unloaded = False
        self.changed = asyncio.Event()

    async def start(self) -> None:
        self.up = True

    async def execute(self, batch: Batch) -> None:
        await self._execute(batch)

    @property
    def ready(self) -> bool:
        return self.up

    async def wait_ready(self) -> None:
        while not self.up:
            if self.lost is not None:
                raise self.lost
            self.changed.clear()
            await self.changed.wait()

    async def unload(self) -> None:
        self.unloaded = True

    def become(self, *, up: bool, lost: PenstockError | None = None) -> None:
        self.up, self.lost = up, lost
        self.changed.set()


async def load(config: ModelConfig, backend: Backend, limiter: RateLimiter | None = None) -> ClassicModel:
    context = ModelContext(
        name=config.name,
        version=1,
        config=config,
        model_folder=Path("."),
        version_folder=Path("1"),
        host=cast(Host, None),
    )
    return await load_model(context, backend, limiter)


@asynccontextmanager
async def served(
    config: ModelConfig, execute: Execute | FunctionBackend = echo, limiter: RateLimiter | None = None
) -> AsyncIterator[ClassicModel]:
    """The model, loaded and at the end stopped; all instances execute this function."""
    backend = execute if isinstance(execute, FunctionBackend) else FunctionBackend(lambda context: execute)
    model = await load(config, backend, limiter)
    try:
        yield model
    finally:
        await model.stop()


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop run until the condition holds; the test's own time limit is the only one."""
    while not condition():
        await asyncio.sleep(0.001)


def check_books(model: ClassicModel, admitted: int) -> None:
    """At rest every request that came is in the statistics once."""
    statistics = model.statistics
    assert statistics.pending == 0
    assert model.queued == 0
    assert statistics.success.count + statistics.fail.count == admitted
    assert statistics.fail.count == sum(statistics.failures.values())
