import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Counts down from INPUT to 0, a response for each execution of the request."""

    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        for request in requests:
            start, ready, id = (
                int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().flatten()[0])
                for name in ("START", "READY", "CORRID")
            )
            if ready:
                self.answer(request, start, id)

    def answer(self, request, start, id):
        value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
        left = int(value.flatten()[0]) if start else self.left[id] - 1
        seen = json.dumps({"START": start, "flags": request.flags()}).encode()
        outputs = [
            pb_utils.Tensor("OUTPUT", np.full(value.shape, left, np.int32)),
            pb_utils.Tensor("SEEN", np.full(value.shape, seen, np.object_)),
        ]
        sender = request.get_response_sender()
        sender.send(pb_utils.InferenceResponse(outputs))
        if left > 0:
            self.left[id] = left
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        else:
            self.left.pop(id, None)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
