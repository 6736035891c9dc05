"""KServe v2 over gRPC: ModelInfer, and ModelStreamInfer of language models."""

from __future__ import annotations

import math
import struct
from time import perf_counter
from typing import Any

from penstock.loadtest.clients.grpc_client import Channel, GrpcClient, Message, method, parameters_of, set_parameters
from penstock.loadtest.clients.kserve_generate import note
from penstock.loadtest.clients.kserve_model import PROMPT_TOKENS, TEXT, TOKENS, LanguageForm, TensorMetadata
from penstock.loadtest.clients.tensors import SIZES, random_tensors
from penstock.loadtest.errors import STREAM_ERROR, TRUNCATED, LoadTestError
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
        answer = await self.unary(channel, "ModelInfer", request)
        return [(perf_counter(), answer)]

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


_FINAL = "triton_final_response"
_WANTS_FINAL: dict[str, object] = {"triton_enable_empty_final_response": True}
_FORMATS = {"BOOL": "<?", "INT32": "<i", "INT64": "<q", "UINT32": "<I", "UINT64": "<Q", "FP32": "<f", "FP64": "<d"}
"""Of one element."""


class GrpcStreamClient(GrpcClient):
    """A request is complete with the response that is marked as the final one."""

    _form: LanguageForm | None = None

    async def open(self) -> None:
        self._form = LanguageForm(self.options, await self.metadata())
        unknown = self.options.extra.keys() - self._form.inputs.keys()
        if unknown:
            raise LoadTestError(f"extra: the model has no input {min(unknown)!r}")

    def request(self, call: Call) -> bytes:
        from tritonclient.grpc import service_pb2

        if self._form is None:
            raise LoadTestError("the client has not been opened")
        message = service_pb2.ModelInferRequest(model_name=self.options.model, id=str(call.index))
        set_parameters(message, _WANTS_FINAL)
        for name, value in self._form.values(call).items():
            tensor = self._form.inputs[name]
            message.inputs.add(name=name, datatype=tensor.datatype, shape=[1] * max(1, len(tensor.shape)))
            message.raw_input_contents.append(_element(tensor, value))
        return bytes(message.SerializeToString())

    async def exchange(self, channel: Channel, request: bytes) -> list[tuple[float, bytes]]:
        import grpc

        # With its only request at once, which is the same on the wire: where a stream is refused while a request is
        # written to it, the library gives a status of its own for the server's.
        call = channel.unary_stream(method("ModelStreamInfer"))(request, metadata=self.channels.metadata)
        try:
            responses: list[tuple[float, bytes]] = []
            while (message := await call.read()) is not grpc.aio.EOF:
                responses.append((perf_counter(), message))
            return responses
        finally:
            call.cancel()  # nothing where it has ended

    def read(self, messages: list[tuple[float, bytes]], answer: Answer) -> None:
        from tritonclient.grpc import service_pb2

        texts: list[str] = []
        final = False
        for time, data in messages:
            message = service_pb2.ModelStreamInferResponse.FromString(data)
            if message.error_message:
                answer.error, answer.detail = STREAM_ERROR, message.error_message[:300]
                return
            response = message.infer_response
            final = response.parameters[_FINAL].bool_param
            self._note(response, time, answer, texts)
            if final:
                answer.ended = time
        if self.options.keep_text:
            answer.text = "".join(texts)
        if not final:
            answer.error, answer.detail = TRUNCATED, "the stream ended without its final response"

    @staticmethod
    def _note(response: Message, time: float, answer: Answer, texts: list[str]) -> None:
        text, tokens = "", None
        if len(response.outputs) != len(response.raw_output_contents):
            raise ValueError(f"{len(response.outputs)} outputs with {len(response.raw_output_contents)} contents")
        for output, data in zip(response.outputs, response.raw_output_contents, strict=True):
            if output.name == TEXT:
                text = _strings(data)
            elif output.name == TOKENS:
                tokens = sum(_counts(data))
            elif output.name == PROMPT_TOKENS:
                answer.prompt_tokens = sum(_counts(data))
        note(answer, time, text, tokens)
        texts.append(text)


def _element(tensor: TensorMetadata, value: Any) -> bytes:
    if tensor.datatype == "BYTES":
        text = str(value).encode()
        return struct.pack("<I", len(text)) + text
    try:
        return struct.pack(_FORMATS[tensor.datatype], value)
    except (KeyError, struct.error):
        raise LoadTestError(f"extra: {value!r} is no {tensor.datatype} for the input {tensor.name}") from None


def _strings(data: bytes) -> str:
    """The elements of a tensor of BYTES, joined. Raises ValueError."""
    texts: list[bytes] = []
    at = 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if end > len(data):
            raise ValueError(f"the output {TEXT} breaks off")
        texts.append(data[at + 4 : end])
        at = end
    return b"".join(texts).decode("utf-8", "replace")


def _counts(data: bytes) -> list[int]:
    """Elements of UINT32."""
    return [number for (number,) in struct.iter_unpack("<I", data[: len(data) // 4 * 4])]
