"""A decoupled model over a gRPC stream: one request, one response for each number, as they come.

python grpc_stream.py [--url 127.0.0.1:8001] [--delay 200]
"""

from __future__ import annotations

import argparse
import queue
import time

import numpy as np
import tritonclient.grpc as triton


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--delay", type=int, default=200, help="milliseconds between responses")
    arguments = parser.parse_args()

    numbers = np.array([4, 8, 15, 16, 23, 42], np.int32)
    delays = np.full(len(numbers), arguments.delay, np.uint32)
    inputs = [triton.InferInput("IN", numbers.shape, "INT32"), triton.InferInput("DELAY", delays.shape, "UINT32")]
    inputs[0].set_data_from_numpy(numbers)
    inputs[1].set_data_from_numpy(delays)

    responses: queue.SimpleQueue[tuple[triton.InferResult | None, Exception | None]] = queue.SimpleQueue()
    begun = time.monotonic()
    with triton.InferenceServerClient(arguments.url) as client:
        client.start_stream(callback=lambda result, error: responses.put((result, error)))
        # the end comes as a response without tensors, for clients that ask for it
        client.async_stream_infer("repeat", inputs, enable_empty_final_response=True)
        while True:
            result, error = responses.get()
            if error is not None:
                raise SystemExit(str(error))
            response = result.get_response()
            if response.outputs:
                found = int(result.as_numpy("OUT")[0]), int(result.as_numpy("IDX")[0])
                print(f"{time.monotonic() - begun:5.2f} s  number {found[1]} is {found[0]}")
            if response.parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()


if __name__ == "__main__":
    main()
