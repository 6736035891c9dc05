"""Models and a store of them for tests of the KServe fronts: nothing is loaded, the arithmetic is numpy's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format

from penstock.classic.base import SaysReady
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.model_config import ModelConfig, datatype_name
from penstock.classic.signature import ModelSignature
from penstock.classic.statistics import ModelStatistics
from penstock.classic.tensors import NUMPY_TYPES, Tensor
from penstock.engines.errors import InvalidRequestError, ModelNotFoundError, PenstockError, UnsupportedError
from penstock.gateway.apis.kserve.store import IndexEntry

Compute = Callable[[InferRequest], list[Tensor]]


class FakeStream:
    """Gives out the responses of a script; exceptions in it end the stream, events are waited for."""

    def __init__(self, responses: Iterable[InferResponse | asyncio.Event]) -> None:
        self._responses = iter(responses)
        self._gate: asyncio.Event | None = None
        self._error: Exception | None = None
        self.closed = asyncio.Event()

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> InferResponse:
        if self._error is not None:
            raise self._error
        if self._gate is not None:
            await self._gate.wait()
            self._gate = None
        for response in self._responses:
            if isinstance(response, InferResponse):
                return response
            await response.wait()
        raise StopAsyncIteration

    def ready(self) -> InferResponse | None:
        if self._gate is not None:
            return None
        try:
            response = next(self._responses, None)
        except Exception as error:  # its turn comes when it is waited for
            self._error = error
            return None
        if isinstance(response, asyncio.Event):
            self._gate = response
            return None
        return response

    def close(self) -> None:
        self.closed.set()


class FakeModel(SaysReady):
    """A model whose answers `compute` makes; it keeps the requests. `gate`, when set, holds every answer back."""

    says_ready = True

    def __init__(self, config: str, compute: Compute, version: int = 1, folder: Path | None = None) -> None:
        self.config: ModelConfig = text_format.Parse(config, ModelConfig())
        self.signature = ModelSignature(self.config)
        self.name: str = self.config.name
        self.version = version
        self.ready = True
        self.statistics = ModelStatistics()
        self.model_folder = folder
        self.requests: list[InferRequest] = []
        self.streams: list[FakeStream] = []
        self.gate: asyncio.Event | None = None
        self.waiting = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.error: PenstockError | None = None
        self.response_parameters: dict[str, bool | int | float | str] = {}
        self.script: Callable[[InferRequest], Iterable[InferResponse | asyncio.Event]] | None = None
        """What `stream` gives; without one, what `infer` would."""
        self._compute = compute

    @property
    def takes_infer(self) -> bool:
        return not self.decoupled

    @property
    def decoupled(self) -> bool:
        return bool(self.config.model_transaction_policy.decoupled)

    async def infer(self, request: InferRequest) -> InferResponse:
        if self.decoupled:
            raise UnsupportedError(f"model '{self.name}' is decoupled")
        self.requests.append(request)
        if self.gate is not None:
            self.waiting.set()
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        return self._answer(request)

    def stream(self, request: InferRequest) -> FakeStream:
        self.requests.append(request)
        stream = FakeStream(self.script(request) if self.script else [self._answer(request)])
        self.streams.append(stream)
        return stream

    async def stop(self) -> None:
        self.ready = False

    def _answer(self, request: InferRequest) -> InferResponse:
        if self.error is not None:
            raise self.error
        self._check(request)
        computed = {tensor.name: tensor for tensor in self._compute(request)}
        for name in request.outputs:
            if name not in computed:
                raise InvalidRequestError(f"unexpected inference output '{name}' for model '{self.name}'")
        wanted = request.outputs or tuple(computed)
        return InferResponse([computed[name] for name in wanted], dict(self.response_parameters))

    def _check(self, request: InferRequest) -> None:
        names = [each.name for each in self.config.input]
        if list(request.inputs) != names and set(request.inputs) != set(names):
            raise InvalidRequestError(
                f"[request id: {request.id or '<id_unknown>'}] expected {len(names)} inputs but got "
                f"{len(request.inputs)} inputs for model '{self.name}'."
            )
        for each in self.config.input:
            tensor = request.inputs[each.name]
            expected = datatype_name(each.data_type)
            if tensor.datatype != expected:
                raise InvalidRequestError(
                    f"inference input '{each.name}' data-type is '{tensor.datatype}', but model '{self.name}' expects "
                    f"'{expected}'"
                )
            shape = list(tensor.array.shape)[1 if self.config.max_batch_size else 0 :]
            if len(shape) != len(each.dims) or any(d not in (-1, s) for d, s in zip(each.dims, shape, strict=True)):
                raise InvalidRequestError(
                    f"[request id: {request.id or '<id_unknown>'}] unexpected shape for input '{each.name}' for model "
                    f"'{self.name}'. Expected {list(each.dims)}, got {shape}. "
                )


def tensor_config(name: str, datatype: str, dims: Iterable[int], extra: str = "") -> str:
    kind = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    return f'{{ name: "{name}" data_type: {kind} dims: {list(dims)} {extra} }}'


def add_sub(name: str = "add_sub", version: int = 1, datatype: str = "FP32") -> FakeModel:
    """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1, of 16 elements each, without batching."""
    ins = " ".join(f"input {tensor_config(f'INPUT{i}', datatype, [16])}" for i in (0, 1))
    outs = " ".join(f"output {tensor_config(f'OUTPUT{i}', datatype, [16])}" for i in (0, 1))

    def compute(request: InferRequest) -> list[Tensor]:
        a, b = request.inputs["INPUT0"].array, request.inputs["INPUT1"].array
        return [Tensor("OUTPUT0", datatype, a + b), Tensor("OUTPUT1", datatype, a - b)]

    return FakeModel(f'name: "{name}" backend: "python" {ins} {outs}', compute, version)


def identity(
    datatype: str, dims: Iterable[int] = (-1,), name: str = "", max_batch_size: int = 0, **options: Any
) -> FakeModel:
    """OUTPUT0 = INPUT0, of any datatype; called `identity_<datatype in small letters>`."""
    dims = list(dims)
    config = (
        f'name: "{name or f"identity_{datatype.lower()}"}" backend: "python" max_batch_size: {max_batch_size} '
        f"input {tensor_config('INPUT0', datatype, dims)} "
        f"output {tensor_config('OUTPUT0', datatype, dims, options.pop('output_extra', ''))}"
    )
    return FakeModel(config, _identity, **options)


def _identity(request: InferRequest) -> list[Tensor]:
    given = request.inputs["INPUT0"]
    return [Tensor("OUTPUT0", given.datatype, given.array)]


def repeat(name: str = "repeat", gate: asyncio.Event | None = None) -> FakeModel:
    """Decoupled: answers IN [n] INT32 with n responses OUT [1] = 0, 1, ..., then with an empty final one."""
    model = FakeModel(
        f'name: "{name}" backend: "python" model_transaction_policy {{ decoupled: true }} '
        f"input {tensor_config('IN', 'INT32', [1])} output {tensor_config('OUT', 'INT32', [1])}",
        lambda request: [],
    )

    def script(request: InferRequest) -> Iterable[InferResponse | asyncio.Event]:
        for index in range(int(request.inputs["IN"].array[0])):
            array = np.array([index], NUMPY_TYPES["INT32"])
            yield InferResponse([Tensor("OUT", "INT32", array)], final=False)
            if gate is not None:
                yield gate
        yield InferResponse(None, final=True)

    model.script = script
    return model


class FakeModelStore:
    """Serves the models it is given. `load` and `unload` are kept as calls, and take part in the index."""

    def __init__(self, *models: FakeModel) -> None:
        self.by_name: dict[str, dict[int, FakeModel]] = {}
        for model in models:
            self.by_name.setdefault(model.name, {})[model.version] = model
        self.ready = True
        self.loads: list[tuple[str, str | None, Mapping[str, bytes] | None]] = []
        self.unloads: list[tuple[str, bool]] = []
        self.entries: list[IndexEntry] = []
        """What the index lists beside the models."""
        self.load_error: PenstockError | None = None

    def model(self, name: str, version: str = "", request: InferRequest | None = None) -> FakeModel:
        versions = self.by_name.get(name)
        if versions is None:
            raise ModelNotFoundError(f"Request for unknown model: '{name}' is not found")
        if version and not (version.isascii() and version.isdigit()):
            raise InvalidRequestError(
                f"failed to get model version from specified version string '{version}' (details: stol), version "
                "should be an integral value > 0"
            )
        if version and int(version) not in versions:
            raise ModelNotFoundError(f"Request for unknown model: '{name}' version {version} is not found")
        if not versions:
            raise ModelNotFoundError(f"Request for unknown model: '{name}' has no available versions")
        return versions[int(version) if version else max(versions)]

    def versions(self, name: str) -> list[int]:
        return sorted(version for version, model in self.by_name.get(name, {}).items() if model.ready)

    def models(self) -> list[FakeModel]:
        return [versions[each] for _, versions in sorted(self.by_name.items()) for each in sorted(versions)]

    def index(self, *, ready: bool) -> list[IndexEntry]:
        loaded = [
            IndexEntry(model.name, str(model.version), "READY" if model.ready else "UNAVAILABLE")
            for model in self.models()
        ]
        return [entry for entry in [*loaded, *self.entries] if not ready or entry.state == "READY"]

    async def load(self, name: str, *, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        self.loads.append((name, config, files))
        if self.load_error is not None:
            raise self.load_error

    async def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        self.unloads.append((name, unload_dependents))


async def responses(stream: AsyncIterator[InferResponse]) -> list[InferResponse]:
    """All that a stream gives."""
    return [response async for response in stream]
