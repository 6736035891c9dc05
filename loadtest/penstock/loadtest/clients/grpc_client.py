"""What clients over gRPC share: metadata, sending, failing."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from time import perf_counter
from typing import Any

import msgspec

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.grpc_channels import Channel, Channels, method
from penstock.loadtest.clients.kserve_model import ModelMetadata, TensorMetadata
from penstock.loadtest.errors import MALFORMED, TIMEOUT, LoadTestError, grpc_error
from penstock.loadtest.messages import Answer, Call

_DETAIL_CHARS = 300
_TIMEOUT = 30.0
Message = Any
"""A protobuf message, which has no types."""


class GrpcClient(ABC):
    """A Client; the protocols say what a request is and how its answers read."""

    def __init__(self, options: ClientOptions) -> None:
        if not options.model:
            raise LoadTestError("model: choose one with --model")
        self.options = options
        self.channels = Channels(options)

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def exchange(self, channel: Channel, request: bytes) -> list[tuple[float, bytes]]:
        """Sends it; (time, message) of each answer."""

    @abstractmethod
    def request(self, call: Call) -> bytes: ...

    @abstractmethod
    def read(self, messages: list[tuple[float, bytes]], answer: Answer) -> None:
        """Fills in what the answers say. Raises ValueError for what is not the protocol's."""

    async def send(self, call: Call) -> Answer:
        import grpc
        from google.protobuf.message import DecodeError

        request = self.request(call)
        answer = Answer(sent=perf_counter(), ended=0.0)
        try:
            async with asyncio.timeout(self.options.timeout):
                with self.channels.connection() as connection:
                    answer.connect = await connection.opened()
                    answer.sent = perf_counter()
                    messages = await self.exchange(connection.channel, request)
            answer.ended = perf_counter()
            self.read(messages, answer)
        except TimeoutError:
            answer.error = TIMEOUT
        except grpc.aio.AioRpcError as error:
            answer.error, answer.detail = grpc_error(error.code().name), (error.details() or "")[:_DETAIL_CHARS]
        except (ValueError, DecodeError) as error:
            answer.error, answer.detail = MALFORMED, str(error)[:_DETAIL_CHARS]
        answer.ended = answer.ended or perf_counter()
        return answer

    async def unary(self, channel: Channel, name: str, request: bytes) -> bytes:
        """The answer of an RPC that has one. Raises ValueError for a status of OK without it."""
        found: bytes | None = await channel.unary_unary(method(name))(request, metadata=self.channels.metadata)
        if found is None:
            raise ValueError("a status of OK without an answer")
        return found

    async def metadata(self) -> ModelMetadata:
        """Raises LoadTestError when the server has none of this model."""
        import grpc
        from google.protobuf.message import DecodeError
        from tritonclient.grpc import service_pb2

        request = service_pb2.ModelMetadataRequest(name=self.options.model).SerializeToString()
        seconds = min(self.options.timeout, _TIMEOUT)
        try:
            async with asyncio.timeout(seconds):
                with self.channels.connection() as connection:
                    await connection.opened()
                    found = await self.unary(connection.channel, "ModelMetadata", request)
            message = service_pb2.ModelMetadataResponse.FromString(found)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except TimeoutError:
            reason = f"nothing came within {seconds:g} s"
        except (ValueError, DecodeError) as error:
            reason = f"{MALFORMED}: {error}"
        else:
            return ModelMetadata(
                [TensorMetadata(each.name, each.datatype, list(each.shape)) for each in message.inputs]
            )
        raise LoadTestError(f"{self.channels.target} has no metadata of the model {self.options.model!r} ({reason})")

    async def close(self) -> None:
        await self.channels.close()


def set_parameters(message: Message, values: dict[str, object]) -> None:
    """Of a request. Raises LoadTestError for a value that is no string, number or boolean."""
    for name, value in values.items():
        if isinstance(value, bool):
            message.parameters[name].bool_param = value
        elif isinstance(value, int):
            message.parameters[name].int64_param = value
        elif isinstance(value, float):
            message.parameters[name].double_param = value
        elif isinstance(value, str):
            message.parameters[name].string_param = value
        else:
            raise LoadTestError(f"extra: the parameter {name} is no string, number or boolean: {value!r}")


def parameters_of(extra: dict[str, object]) -> dict[str, object]:
    """All that the options may add to a request of gRPC. Raises LoadTestError for the rest."""
    unknown = extra.keys() - {"parameters"}
    if unknown:
        raise LoadTestError(f"extra: gRPC requests take 'parameters', not {min(unknown)!r}")
    try:
        return msgspec.convert(extra.get("parameters") or {}, dict[str, Any])
    except msgspec.ValidationError:
        raise LoadTestError("extra: parameters is no object") from None
