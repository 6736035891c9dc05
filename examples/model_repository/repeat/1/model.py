"""Says every number of its input again, one response each: a decoupled model.

Each request is answered from a thread of its own, so that execute can return and the next request can begin.
"""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self._threads = set()

    def execute(self, requests):
        for request in requests:
            numbers = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            given = pb_utils.get_input_tensor_by_name(request, "DELAY")
            delays = np.zeros(len(numbers)) if given is None else given.as_numpy()
            sender = request.get_response_sender()
            if len(delays) != len(numbers):
                error = pb_utils.TritonError("DELAY must be as long as IN", pb_utils.TritonError.INVALID_ARG)
                final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                sender.send(pb_utils.InferenceResponse(error=error), flags=final)
                continue
            thread = threading.Thread(target=self._repeat, args=(sender, numbers.copy(), delays.copy()))
            self._threads.add(thread)
            thread.start()
        # a decoupled model returns nothing: what it has to say goes through the sender

    def _repeat(self, sender, numbers, delays):
        try:
            for index, (number, delay) in enumerate(zip(numbers, delays, strict=True)):
                time.sleep(delay / 1000)
                if sender.is_cancelled():
                    break
                out = pb_utils.Tensor("OUT", np.array([number], np.int32))
                idx = pb_utils.Tensor("IDX", np.array([index], np.uint32))
                sender.send(pb_utils.InferenceResponse([out, idx]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        finally:
            self._threads.discard(threading.current_thread())

    def finalize(self):
        for thread in list(self._threads):
            thread.join()
