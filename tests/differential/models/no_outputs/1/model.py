import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """No output, or one that the configuration does not have."""

    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            given = [pb_utils.Tensor("OUTPUT0", tensor.as_numpy())] if tensor.as_numpy()[0, 0] == b"more" else []
            responses.append(pb_utils.InferenceResponse(given))
        return responses
