import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT0: the inputs of the requests that came before the first sequence."""

    def initialize(self, args):
        self.before = []

    def execute(self, requests):
        responses = []
        for request in requests:
            tensors = {t.name(): t.as_numpy() for t in request.inputs()}
            told = " ".join(f"{name} {value.dtype} {value.tolist()}" for name, value in sorted(tensors.items()))
            output = pb_utils.Tensor("OUTPUT0", np.array([["; ".join(self.before)]], np.object_))
            state = pb_utils.Tensor("NEXT", tensors["STATE"])
            responses.append(pb_utils.InferenceResponse([output, state]))
            self.before.append(told)
        return responses
