import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Counts down from IN to 1, a response for each execution. The server keeps the number that is left."""

    def execute(self, requests):
        for request in requests:
            self.step(request)

    def step(self, request):
        values = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        left = values["IN"] if values["START"][0, 0] else values["LEFT"]
        tensors = [pb_utils.Tensor("OUT", left), pb_utils.Tensor("LEFT_NOW", left - 1)]
        last = left[0, 0] <= 1
        if not last:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
        request.get_response_sender().send(pb_utils.InferenceResponse(tensors), flags=flags)
