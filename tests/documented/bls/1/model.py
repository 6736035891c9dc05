import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


def doubled(number):
    """A request to `simple`, which adds IN to itself."""
    row = np.full((1, 16), number, np.int32)
    inputs = [pb_utils.Tensor(name, row) for name in ("INPUT0", "INPUT1")]
    return pb_utils.InferenceRequest(model_name="simple", requested_output_names=["OUTPUT0"], inputs=inputs)


def squared(number):
    """A request to `square_int32`, which sends IN as often as it says."""
    inputs = [pb_utils.Tensor("IN", np.array([number], np.int32))]
    return pb_utils.InferenceRequest(model_name="square_int32", requested_output_names=["OUT"], inputs=inputs)


def first(response, name):
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return int(pb_utils.get_output_tensor_by_name(response, name).as_numpy().flatten()[0])


class TritonPythonModel:
    """Asks another model as HOW says: "exec" and "async_exec" one that answers once, "decoupled" one that streams."""

    async def execute(self, requests):
        return await asyncio.gather(*(self.answer(request) for request in requests))

    async def answer(self, request):
        number = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
        how = pb_utils.get_input_tensor_by_name(request, "HOW").as_numpy()[0].decode()
        try:
            total = await self.ask(how, number)
        except pb_utils.TritonModelException as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([total], np.int32))])

    async def ask(self, how, number):
        if how == "exec":
            return first(doubled(number).exec(), "OUTPUT0")
        if how == "async_exec":
            answers = await asyncio.gather(doubled(number).async_exec(), doubled(number).async_exec())
            return sum(first(answer, "OUTPUT0") for answer in answers)
        responses = await squared(number).async_exec(decoupled=True)
        # the last one may be the final flag alone
        return sum(first(response, "OUT") for response in responses if response.output_tensors())
