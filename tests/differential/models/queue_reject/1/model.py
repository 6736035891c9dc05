import os
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers when the file named by INPUT0 exists; an empty name does not wait."""

    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "INPUT0")) for request in requests]

    def answer(self, tensor):
        path = tensor.as_numpy().reshape(-1)[0].decode()
        while path.startswith("/") and not os.path.exists(path):
            time.sleep(0.005)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", tensor.as_numpy())])
