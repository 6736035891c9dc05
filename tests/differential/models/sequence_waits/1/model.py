import json

import numpy as np
import triton_python_backend_utils as pb_utils

CONTROLS = ("START", "END", "READY", "CORRID")


class TritonPythonModel:
    """SUM: of the inputs of a sequence so far. SEEN: the request's controls, and which rows of the batch are ready."""

    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        seen = [self.controls(request) for request in requests]
        ready = [bool(each.get("READY", True)) for each in seen]
        return [self.answer(request, each, ready) for request, each in zip(requests, seen, strict=True)]

    def controls(self, request):
        seen = {"flags": request.flags(), "id": request.correlation_id()}
        for name in CONTROLS:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is not None:
                array = tensor.as_numpy()
                value = array.flatten()[0]
                seen[name] = value.decode() if array.dtype == np.object_ else value.item()
                seen[name + " shape"] = list(array.shape)
        return seen

    def answer(self, request, seen, ready):
        value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
        id = seen.get("CORRID", seen["id"])
        if seen.get("READY", True):
            if seen["START"]:
                self.sums[id] = 0
            self.sums[id] += int(value.flatten()[0])
        total = np.full(value.shape, self.sums.get(id, 0), np.int32)
        text = np.full(value.shape, json.dumps({**seen, "ready": ready}).encode(), np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", total), pb_utils.Tensor("SEEN", text)])
