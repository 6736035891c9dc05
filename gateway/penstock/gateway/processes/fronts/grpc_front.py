"""The gRPC port of a front: inference. The supervisor answers all other RPCs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.grpc.infer import InferRpcs
from penstock.gateway.apis.kserve.grpc.messages import parse
from penstock.gateway.apis.kserve.grpc.rpc import Metadata, Method, Rpc, RpcGuard
from penstock.gateway.apis.kserve.grpc.service import INFER_PATH, STREAM_PATH
from penstock.gateway.apis.kserve.grpc.settings import GrpcSettings
from penstock.gateway.processes.fronts.forwarding import ForwardedCall, Forwarder, end_rpc
from penstock.gateway.processes.fronts.front_models import FrontModels
from penstock.gateway.processes.fronts.quotas import QuotaClient
from penstock.gateway.requests.access import INFER
from penstock.gateway.requests.context import RequestContext

_EOF = grpc.aio.EOF
_NAME, _VERSION = 0x0A, 0x12
"""Tags of the first two fields of a ModelInferRequest."""


class FrontGuard(RpcGuard):
    def __init__(self, quotas: QuotaClient, *args: Any) -> None:
        """The rest is as for Guard."""
        super().__init__(*args)
        self._quotas = quotas

    async def take_in(self, context: RequestContext, data: bytes) -> None:
        self.hold(context, data)
        await self._quotas.count(context)


class FrontService:
    """Finds what serves an RPC, as `kserve.grpc.service.Service` does."""

    def __init__(
        self, kserve: KServe, guard: FrontGuard, settings: GrpcSettings, models: FrontModels, forwarder: Forwarder
    ) -> None:
        self._guard = guard
        self._models = models
        self._forwarder = forwarder
        rpcs = InferRpcs(kserve, guard, settings)
        infer, stream = guard.unary(INFER, rpcs.infer), guard.stream(INFER, rpcs.stream)
        self._methods = {
            INFER_PATH: Method(INFER, lambda context: self._infer_handler(infer.handler(context).unary_unary)),
            STREAM_PATH: Method(INFER, lambda context: self._stream_handler(stream.handler(context).stream_stream)),
        }

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        path = details.method
        method = self._methods.get(path)
        if method is not None:
            return self._guard.handler(path, method, details.invocation_metadata)

        async def call(_: object, rpc: Rpc) -> None:
            await self._forwarder.call(path, rpc)

        return grpc.stream_stream_rpc_method_handler(call)

    def _infer_handler(self, own: Callable[[bytes, Rpc], Any]) -> grpc.RpcMethodHandler:
        async def call(data: bytes, rpc: Rpc) -> bytes:
            if self._is_served(data):
                return bytes(await own(data, rpc))
            return await self._forwarder.unary(INFER_PATH, rpc, data)

        return grpc.unary_unary_rpc_method_handler(call)

    def _stream_handler(self, own: Callable[[object, Rpc], Any]) -> grpc.RpcMethodHandler:
        async def call(_: object, rpc: Rpc) -> None:
            first = await rpc.read()
            if first is _EOF or self._is_served(first):
                split = _SplitStream(rpc, first, self._is_served, self._forwarder)
                try:
                    await own(None, split)
                finally:
                    split.close()
            else:
                await self._forwarder.call(STREAM_PATH, rpc, first)

        return grpc.stream_stream_rpc_method_handler(call)

    def _is_served(self, data: bytes) -> bool:
        """Whether this front answers for the request's model."""
        return self._models.has_tensors(*_model_of(data))


def _model_of(data: bytes) -> tuple[str, str]:
    """Name and version in a ModelInferRequest, ("", "") for what is none."""
    name, end = _text(data, 0, _NAME)
    if name is None:
        try:
            message = parse(data)
        except InvalidRequestError:
            return "", ""
        return message.model_name, message.model_version
    version, _ = _text(data, end, _VERSION)
    return name, version or ""


def _text(data: bytes, at: int, tag: int) -> tuple[str | None, int]:
    """The text of a field that begins here, and where it ends; None: no short one does."""
    if len(data) < at + 2 or data[at] != tag or data[at + 1] >= 0x80:
        return None, at
    end = at + 2 + data[at + 1]
    return data[at + 2 : end].decode("utf-8", "replace"), end


class _SplitStream:
    """A ModelStreamInfer of which this front serves some requests, and the supervisor the others: those of a model that
    this front has not, or no longer since the stream began."""

    def __init__(self, rpc: Rpc, first: Any, is_served: Callable[[bytes], bool], forwarder: Forwarder) -> None:
        self._rpc = rpc
        self._first = first
        self._is_served = is_served
        self._forwarder = forwarder
        self._passed: ForwardedCall | None = None
        self._writing = asyncio.Lock()

    async def read(self) -> Any:
        """The next request for this front, or EOF when the others are answered, too."""
        while True:
            data, self._first = self._first, None
            if data is None:
                data = await self._rpc.read()
            if data is _EOF:
                self._first = _EOF
                if self._passed is not None:
                    self._passed.end()
                    await self._end(self._passed)
                return data
            if self._is_served(data):
                return data
            if self._passed is None:
                self._passed = self._forwarder.open(STREAM_PATH, self._rpc, self.write)
            try:
                await self._passed.send(data)
            except ConnectionError:
                passed, self._passed = self._passed, None
                try:
                    await self._end(passed)
                finally:
                    passed.close()

    async def _end(self, passed: ForwardedCall) -> None:
        """Raises CancelledError where the supervisor has ended its part with a status, which the caller is told."""
        finished = await passed.relaying
        if finished.code:
            with suppress(Exception):
                await end_rpc(self._rpc, finished)
            raise asyncio.CancelledError

    async def write(self, data: bytes) -> None:
        async with self._writing:
            await self._rpc.write(data)

    def close(self) -> None:
        if self._passed is not None:
            self._passed.close()

    def invocation_metadata(self) -> Metadata:
        return self._rpc.invocation_metadata()

    def time_remaining(self) -> float | None:
        return self._rpc.time_remaining()

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._rpc.set_trailing_metadata(metadata)

    async def abort(self, code: grpc.StatusCode, details: str) -> Any:
        return await self._rpc.abort(code, details)
