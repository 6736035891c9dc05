import numpy as np
import triton_python_backend_utils as pb_utils

ZEROS = np.zeros(128 << 10, np.float32)


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", ZEROS)]) for _ in requests]
