"""InferResponse to ModelInferResponse."""

from __future__ import annotations

from functools import partial
from typing import Any

from tritonclient.grpc.service_pb2 import ModelInferResponse, ModelStreamInferResponse

from penstock.classic.base import InferModel
from penstock.classic.messages import InferResponse
from penstock.classic.tensors import Tensor, to_buffer
from penstock.gateway.errors import public_message
from penstock.gateway.front.intake import WorkPool
from penstock.gateway.kserve.classification import Labels, classified
from penstock.gateway.kserve.grpc.decode import OutputOptions
from penstock.gateway.kserve.grpc.parameters import FINAL, write_parameters

Options = dict[str, OutputOptions] | None


async def with_classes(
    outputs: list[Tensor], model: InferModel, options: Options, labels: Labels, pool: WorkPool
) -> list[Tensor]:
    """The outputs with those as classes of which the caller wants classes. A million of them take a second: `pool` has
    threads for that."""
    if options is None:
        return outputs
    batched = model.config.max_batch_size > 0
    found = []
    for tensor in outputs:
        option = options.get(tensor.name)
        if option is not None and option.classes:
            names = await labels.of(model, tensor.name)
            making = partial(classified, tensor, option.classes, batched=batched, labels=names)
            found.append(await pool.run(tensor.array.size, making))
        else:
            found.append(tensor)
    return found


def fill_response(message: Any, response: InferResponse, outputs: list[Tensor], options: Options) -> None:
    """Outputs go to raw_output_contents, an empty entry for those that went to shared memory."""
    add, append = message.outputs.add, message.raw_output_contents.append
    for tensor in outputs:
        option = options.get(tensor.name) if options is not None else None
        data = to_buffer(tensor)
        if option is None or option.region is None:
            add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
            append(data)
            continue
        option.region.write(data)
        output = add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
        output.parameters["shared_memory_region"].string_param = option.region_name
        output.parameters["shared_memory_byte_size"].int64_param = len(data)
        append(b"")
    if response.parameters:
        write_parameters(message.parameters, response.parameters)


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
