import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A response for each element of IN, each after its DELAY; the next request waits for WAIT: milliseconds."""

    def execute(self, requests):
        for request in requests:
            values = {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}
            # a daemon, so that a client's long delays do not keep the model from being unloaded
            threading.Thread(target=self.repeat, args=(request.get_response_sender(), values), daemon=True).start()
            time.sleep(values["WAIT"][0] / 1000)

    def repeat(self, sender, values):
        for index, (number, delay) in enumerate(zip(values["IN"], values["DELAY"], strict=True)):
            time.sleep(delay / 1000)
            if sender.is_cancelled():
                break
            outputs = (("OUT", number, np.int32), ("IDX", index, np.uint32))
            tensors = [pb_utils.Tensor(name, np.array([value], kind)) for name, value, kind in outputs]
            sender.send(pb_utils.InferenceResponse(tensors))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
