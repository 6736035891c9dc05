import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """For each row N responses, with an error in place of response FAIL_AT; the requests of a batch in turn, from a
    thread. TOGETHER is how many requests were executed together. Endless where N is negative, until it is cancelled."""

    def execute(self, requests):
        streams = [[request.get_response_sender(), *map(self.rows, self.values(request)), 0] for request in requests]
        threading.Thread(target=self.answer, args=(streams, len(requests))).start()

    def values(self, request):
        return [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("N", "FAIL_AT")]

    def rows(self, array):
        return array.reshape(-1).tolist()

    def answer(self, streams, together):
        while streams:
            for stream in list(streams):
                sender, count, fail_at, index = stream
                if index == count[0] or sender.is_cancelled():
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                    streams.remove(stream)
                    continue
                if index == fail_at[0]:
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("it broke")))
                else:
                    rows = [[[value]] * len(count) for value in (index, together)]
                    tensors = zip(("INDEX", "TOGETHER"), (np.array(each, dtype=np.int32) for each in rows), strict=True)
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor(*each) for each in tensors]))
                stream[3] += 1
            time.sleep(0.002)
