import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Gives back the bytes that it gets, and the request's own parameters."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", given)], parameters={"given": request.parameters()}
        )
