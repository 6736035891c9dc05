import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Slower than the model before it."""

    def execute(self, requests):
        time.sleep(0.1)
        values = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value + 1)]) for value in values]
