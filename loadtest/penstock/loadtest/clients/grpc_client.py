"""The base of clients over gRPC: connections, metadata, sending, failing."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.kserve_model import ModelMetadata, TensorMetadata
from penstock.loadtest.errors import MALFORMED, TIMEOUT, LoadTestError, grpc_error
from penstock.loadtest.messages import Answer, Call

CALLS_PER_CHANNEL = 32
"""A connection has at most so many calls at a time, then there is another one: servers bound the calls of one, and what
is beyond that would wait within the library, unseen."""
_SERVICE = "/inference.GRPCInferenceService/"
_OURS = frozenset({"connection", "content-length", "content-type", "te", "transfer-encoding", "upgrade", "user-agent"})
_KEY = re.compile(r"[0-9a-z_.-]+(?<!-bin)")
"""Of metadata as text (gRPC's PROTOCOL-HTTP2.md, "Custom-Metadata")."""
_PREFIXES = ("http", "grpc", "https", "grpcs")
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),  # else one that the environment names would be measured, too
    ("grpc.use_local_subchannel_pool", 1),  # else channels to one address would be one connection
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
Channel = Any
"""grpc.aio.Channel, which has no types."""


class Connection:
    """A channel, with the calls that it has."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.calls = 0
        self._opening = asyncio.create_task(self._open())

    async def opened(self) -> float:
        """Waits until it is connected, or cannot be, which a call then says. Seconds that took; 0: it was open."""
        if self._opening.done():
            return 0.0
        began = perf_counter()
        await asyncio.shield(self._opening)
        return perf_counter() - began

    async def _open(self) -> None:
        from grpc import ChannelConnectivity

        state = self.channel.get_state(try_to_connect=True)
        while state not in (ChannelConnectivity.READY, ChannelConnectivity.TRANSIENT_FAILURE):
            await self.channel.wait_for_state_change(state)
            state = self.channel.get_state()

    async def close(self) -> None:
        self._opening.cancel()
        await self.channel.close()


class Channels:
    """Connections to one server, opened as calls at a time need them."""

    def __init__(self, options: ClientOptions) -> None:
        """Raises LoadTestError for what is no address, and for options that gRPC has no place for."""
        self.target, self._tls = _target(options.url)
        if not options.verify_tls:
            raise LoadTestError(
                "verify-tls: gRPC always checks them; GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names others to trust"
            )
        if not options.keep_alive:
            raise LoadTestError("keep-alive: gRPC keeps its connections")
        self.metadata = _metadata(options)
        self._connections: list[Connection] = []

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """The one with the fewest calls, for one more."""
        least_used = min(self._connections, key=lambda connection: connection.calls, default=None)
        if least_used is None or least_used.calls >= CALLS_PER_CHANNEL:
            least_used = Connection(self._open())
            self._connections.append(least_used)
        least_used.calls += 1
        try:
            yield least_used
        finally:
            least_used.calls -= 1

    def _open(self) -> Channel:
        import grpc

        if self._tls:
            return grpc.aio.secure_channel(self.target, grpc.ssl_channel_credentials(), options=_CHANNEL_OPTIONS)
        return grpc.aio.insecure_channel(self.target, options=_CHANNEL_OPTIONS)

    async def close(self) -> None:
        connections, self._connections = self._connections, []
        for connection in connections:
            await connection.close()


def method(name: str) -> str:
    return _SERVICE + name


def _metadata(options: ClientOptions) -> list[tuple[str, str]]:
    """Of each call. Raises LoadTestError for headers that the library drops, or that make it fail."""
    metadata = {} if options.api_key is None else {"authorization": f"Bearer {options.api_key}"}
    for name, value in options.headers.items():
        key = name.lower()
        if key in _OURS or key.startswith("grpc-"):
            raise LoadTestError(f"header: {name} is set by gRPC itself")
        if not _KEY.fullmatch(key) or not value.isascii():
            raise LoadTestError(
                f"header: {name} cannot be metadata of gRPC, whose names are of a-z, 0-9, _, . and -, "
                "do not end with -bin, and have values of ASCII"
            )
        metadata[key] = value
    return list(metadata.items())


def _target(url: str) -> tuple[str, bool]:
    """("host:port", whether it speaks TLS)."""
    try:
        parts = urlsplit(url if "//" in url else f"grpc://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise LoadTestError(f"url: {url!r} is not an address: {error}") from None
    if parts.username is not None:
        raise LoadTestError("url: it may have a host and a port, nothing else (--api-key, --header)")
    if parts.scheme not in _PREFIXES or not host or not port or parts.path.strip("/") or parts.query or parts.fragment:
        raise LoadTestError(f"url: {url!r} is not the HOST:PORT of a gRPC server")
    return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}"), parts.scheme in ("https", "grpcs")


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
        answer: bytes | None = await channel.unary_unary(method(name))(request, metadata=self.channels.metadata)
        if answer is None:
            raise ValueError("a status of OK without an answer")
        return answer

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
                    answer = await self.unary(connection.channel, "ModelMetadata", request)
            message = service_pb2.ModelMetadataResponse.FromString(answer)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except TimeoutError:
            reason = f"nothing came within {seconds:g} s"
        except (ValueError, DecodeError) as error:
            reason = f"{MALFORMED}: {error}"
        else:
            return ModelMetadata(
                [TensorMetadata(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in message.inputs]
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
        raise LoadTestError("extra: parameters must be an object") from None
