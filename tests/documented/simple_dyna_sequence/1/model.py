import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT: the sum of a sequence's inputs so far. A model that gets CORRID adds the id to the last one."""

    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        values = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        total = np.zeros((1, 1), np.int32)
        if values["READY"][0, 0]:
            key = request.correlation_id()
            total += self.sums.pop(key, 0) * (not values["START"][0, 0]) + values["INPUT"][0, 0]
            ends = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
            if not ends:
                self.sums[key] = int(total[0, 0])
            elif "CORRID" in values:
                total += int(values["CORRID"][0, 0])
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", total)])
