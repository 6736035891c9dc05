"""InferResponse to ModelInferResponse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tritonclient.grpc.service_pb2 import ModelInferResponse, ModelStreamInferResponse

from penstock.classic.messages import Parameter
from penstock.classic.tensors import Tensor, to_buffer
from penstock.gateway.errors import public_message
from penstock.gateway.kserve.grpc.parameters import FINAL, write_parameters
from penstock.gateway.kserve.tensor_plane import OutputForm


def fill_response(
    message: Any, outputs: Iterable[Tensor], parameters: Mapping[str, Parameter], forms: Mapping[str, OutputForm] | None
) -> None:
    """Outputs go to raw_output_contents, an empty entry for those that go to shared memory. `parameters` are those of
    the response."""
    add, append = message.outputs.add, message.raw_output_contents.append
    for tensor in outputs:
        form = forms.get(tensor.name) if forms is not None else None
        data = to_buffer(tensor)
        if form is None or form.memory is None:
            add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
            append(data)
            continue
        form.memory.write(data)
        output = add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
        output.parameters["shared_memory_region"].string_param = form.memory.region_name
        output.parameters["shared_memory_byte_size"].int64_param = len(data)
        append(b"")
    if parameters:
        write_parameters(message.parameters, parameters)


def stream_error(error: Exception, request_id: str, model_name: str = "", final: bool | None = None) -> bytes:
    """A message that ends a request, or tells an error in its midst. `final` is None for requests that never began:
    these have no flag."""
    message = ModelStreamInferResponse(error_message=public_message(error))
    message.infer_response.id = request_id
    if final is not None:
        message.infer_response.model_name = model_name
        message.infer_response.parameters[FINAL].bool_param = final
    return bytes(message.SerializeToString())


def empty_final(request_id: str, model_name: str) -> bytes:
    """The end of a request without a last response."""
    message = ModelStreamInferResponse(infer_response=ModelInferResponse(model_name=model_name, id=request_id))
    message.infer_response.parameters[FINAL].bool_param = True
    return bytes(message.SerializeToString())
