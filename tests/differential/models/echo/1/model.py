import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """SEEN: what the model can see of its request, as JSON."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        seen = {
            "id": request.request_id(),
            "correlation_id": request.correlation_id(),
            "flags": request.flags(),
            "timeout": request.timeout(),
            "outputs": sorted(request.requested_output_names()),
            "parameters": dict(sorted(json.loads(request.parameters() or "{}").items())),
            "inputs": [(t.name(), t.as_numpy().tolist()[0].decode()) for t in request.inputs()],
        }
        value = np.array([json.dumps(seen).encode()], dtype=np.object_)
        tensors = [pb_utils.Tensor(name, value) for name in ("SEEN", "OTHER")]
        return pb_utils.InferenceResponse([t for t in tensors if t.name() in request.requested_output_names()])
