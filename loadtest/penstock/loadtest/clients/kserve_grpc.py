"""KServe v2 inference over gRPC: ModelInfer."""

from __future__ import annotations

import math
from time import perf_counter

from penstock.loadtest.clients.grpc_channels import Channel
from penstock.loadtest.clients.grpc_client import GrpcClient, Message, parameters_of, set_parameters
from penstock.loadtest.clients.tensors import SIZES, random_tensors
from penstock.loadtest.messages import Answer, Call


class GrpcInferClient(GrpcClient):
    """One request is made when the client is opened, and sent again and again, as over HTTP."""

    _request = b""

    async def open(self) -> None:
        from tritonclient.grpc import service_pb2

        options = self.options
        message = service_pb2.ModelInferRequest(model_name=options.model)
        set_parameters(message, parameters_of(options.extra))
        for tensor in random_tensors(options, None if options.input_tensor else await self.metadata()):
            message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            message.raw_input_contents.append(tensor.raw())
        self._request = message.SerializeToString()

    def request(self, call: Call) -> bytes:
        return self._request

    async def exchange(self, channel: Channel, request: bytes) -> list[tuple[float, bytes]]:
        found = await self.unary(channel, "ModelInfer", request)
        return [(perf_counter(), found)]

    def read(self, messages: list[tuple[float, bytes]], answer: Answer) -> None:
        from tritonclient.grpc import service_pb2

        [(answer.ended, data)] = messages
        answer.output_tokens = 0
        check_outputs(service_pb2.ModelInferResponse.FromString(data))


def check_outputs(message: Message) -> None:
    """Raises ValueError for outputs that lack elements. Those as typed contents are taken as they are."""
    raw = message.raw_output_contents
    if not message.outputs or (raw and len(raw) != len(message.outputs)):
        raise ValueError(f"an answer with {len(message.outputs)} outputs and {len(raw)} contents")
    for output, data in zip(message.outputs, raw, strict=False):
        item = SIZES.get(output.datatype)
        if item is not None and len(data) != item * math.prod(output.shape):
            raise ValueError(f"output {output.name} has not as many elements as its shape {list(output.shape)} says")
