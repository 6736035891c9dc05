"""An inference whose tensors never travel: both sides map the same shared memory. On the server's machine only.

penstock serve --model-repository examples/model_repository --allow-client-shm
python shared_memory.py [--url 127.0.0.1:8000]
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack

import numpy as np
import tritonclient.http as triton
import tritonclient.utils.shared_memory as shm

SIZE = 16 * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="127.0.0.1:8000")
    parser.add_argument("--model", default="add_sub_onnx", help="add_sub_onnx or add_sub")
    arguments = parser.parse_args()

    left = np.arange(16, dtype=np.float32).reshape(1, 16)
    # names that no other client on this machine uses
    sent, received = f"add_sub_inputs_{os.getpid()}", f"add_sub_outputs_{os.getpid()}"
    with ExitStack() as cleanup:
        client = cleanup.enter_context(triton.InferenceServerClient(arguments.url))
        regions = {}
        for name in (sent, received):
            regions[name] = shm.create_shared_memory_region(name, f"/{name}", 2 * SIZE)
            cleanup.callback(shm.destroy_shared_memory_region, regions[name])
            client.register_system_shared_memory(name, f"/{name}", 2 * SIZE)
            cleanup.callback(client.unregister_system_shared_memory, name)
        shm.set_shared_memory_region(regions[sent], [left, left])
        inputs = [triton.InferInput(name, [1, 16], "FP32") for name in ("INPUT0", "INPUT1")]
        outputs = [triton.InferRequestedOutput(name, binary_data=True) for name in ("OUTPUT0", "OUTPUT1")]
        for index in range(2):
            inputs[index].set_shared_memory(sent, SIZE, offset=index * SIZE)
            outputs[index].set_shared_memory(received, SIZE, offset=index * SIZE)
        client.infer(arguments.model, inputs, outputs=outputs)
        # a copy: the memory is gone at the end of this block
        sums = shm.get_contents_as_numpy(regions[received], np.float32, [1, 16]).copy()
    print("sums", sums[0])
    np.testing.assert_array_equal(sums, left + left)


if __name__ == "__main__":
    main()
