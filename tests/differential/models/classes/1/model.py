import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT0 is INPUT0."""

    def execute(self, requests):
        values = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value)]) for value in values]
