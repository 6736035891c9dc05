import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """N responses, with an error in place of response FAIL_AT, then the final flag."""

    def execute(self, requests):
        for request in requests:
            values = {t.name(): t.as_numpy() for t in request.inputs()}
            self.send(request.get_response_sender(), values)

    def send(self, sender, values):
        for index in range(int(values["N"][0])):
            if index == values.get("FAIL_AT", [-1])[0]:
                error = pb_utils.TritonError("it broke", pb_utils.TritonError.UNAVAILABLE)
                sender.send(pb_utils.InferenceResponse(error=error))
                continue
            tensors = [pb_utils.Tensor("INDEX", np.array([index], dtype=np.int32))]
            if "TEXT" in values:
                tensors.append(pb_utils.Tensor("TEXT", values["TEXT"]))
            sender.send(pb_utils.InferenceResponse(tensors))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
