"""A real gRPC port in the test's own event loop, over fake models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.grpc.aio import InferenceServerClient, InferInput

from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.grpc.rpc import RpcGuard
from penstock.gateway.apis.kserve.grpc.server import GrpcServer
from penstock.gateway.apis.kserve.grpc.settings import GrpcSettings
from penstock.gateway.apis.kserve.logs import LogSettings
from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions
from penstock.gateway.apis.kserve.tracing import Tracing
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.requests.access import ApiKeys, Restrictions
from penstock.gateway.requests.call import DrainState, RequestJournal
from support.kserve import FakeModel, FakeModelStore
from support.model_host import served_from_a_front

_TRANSPORT: ContextVar[str] = ContextVar("transport", default="penstock")
FROM_A_FRONT: ContextVar[bool] = ContextVar("from_a_front", default=False)
"""True: `serving` serves the models from a front process's half of the model host's border."""
_LOGS = LogSettings(handlers=())
SECONDS = 20
"""More than any of these calls takes."""


@pytest.fixture(params=["penstock", "grpcio"], autouse=True)
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """Import it into a module whose tests hold for both transports: each test then runs with both."""
    token = _TRANSPORT.set(request.param)
    yield request.param
    _TRANSPORT.reset(token)


def kserve_of(*models: FakeModel, allow_shared_memory: bool = True, **options: Any) -> KServe:
    return KServe(
        names=Catalogue(),
        models=FakeModelStore(*models),
        shared_memory=SharedMemoryRegions(allow_shared_memory),
        tracing=options.pop("tracing", None) or Tracing(),
        logs=_LOGS,
        **options,
    )


@dataclass
class Running:
    server: GrpcServer
    kserve: KServe
    drain: DrainState
    channel: grpc.aio.Channel
    stub: Any
    ready: bool = True

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def store(self) -> Any:
        return self.kserve.models

    def client(self) -> InferenceServerClient:
        """tritonclient's; to be closed by the caller."""
        return InferenceServerClient(self.address)


@asynccontextmanager
async def serving(
    *models: FakeModel,
    keys: ApiKeys | None = None,
    restrictions: Restrictions | None = None,
    kserve: KServe | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    drain = DrainState()
    kserve = kserve or kserve_of(*models)
    running: Running | None = None
    async with AsyncExitStack() as ending:
        served = kserve
        if FROM_A_FRONT.get():
            served = await ending.enter_async_context(served_from_a_front(kserve))
        server = GrpcServer(
            GrpcSettings(port=0, **{"transport": _TRANSPORT.get(), **settings}),
            served,
            lambda: running is not None and running.ready,
            RpcGuard(keys, drain, RequestJournal(), restrictions),
        )
        await server.start()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}")
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        running = Running(server, kserve, drain, channel, stub)
        try:
            async with asyncio.timeout(60):
                yield running
        finally:
            await channel.close()
            await server.stop()


def infer_request(model: str, inputs: dict[str, np.ndarray], request_id: str = "7", **parameters: Any) -> Any:
    """With raw contents; numbers and text go as they are, other parameters as (field, value)."""
    message = pb.ModelInferRequest(model_name=model, id=request_id)
    for name, array in inputs.items():
        triton = InferInput(name, list(array.shape), datatype_name(array))
        triton.set_data_from_numpy(array)
        message.inputs.append(triton._get_tensor())
        message.raw_input_contents.append(triton._get_content())
    for name, value in parameters.items():
        message.parameters[name].CopyFrom(parameter(value))
    return message


def parameter(value: Any) -> Any:
    if isinstance(value, tuple):
        return pb.InferParameter(**dict([value]))
    kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
    return pb.InferParameter(**{kind: value})


def datatype_name(array: np.ndarray) -> str:
    from tritonclient.utils import np_to_triton_dtype

    return str(np_to_triton_dtype(array.dtype))


def floats(value: float = 1.0) -> np.ndarray:
    return np.full(16, value, np.float32)


def add_sub_request(request_id: str = "7", **parameters: Any) -> Any:
    return infer_request("add_sub", {"INPUT0": floats(3), "INPUT1": floats(1)}, request_id, **parameters)


def repeat_request(count: int, request_id: str = "7", **parameters: Any) -> Any:
    return infer_request("repeat", {"IN": np.array([count], np.int32)}, request_id, **parameters)


async def failure(call: Any) -> tuple[str, str]:
    """Status and details of a call that has to fail. A stream that is refused is best not written to: the library's
    client then takes its own failed write for the end of the call now and then."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    raise AssertionError("the call succeeded")


async def read_all(stream: Any) -> list[Any]:
    found = []
    while (message := await stream.read()) is not grpc.aio.EOF:
        found.append(message)
    return found


async def each(messages: Iterable[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message
