import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT0: where its instance runs, and how many requests it has had."""

    def initialize(self, args):
        self.place = " ".join(args[f"model_instance_{name}"] for name in ("name", "kind", "device_id"))
        self.count = 0

    def execute(self, requests):
        responses = []
        for request in requests:
            text = f"{self.place} {self.count} {len(request.inputs())}"
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([text], np.object_))]))
            self.count = 1
        return responses
