"""An inference whose tensors never travel: both sides map the same shared memory. On the server's machine only.

penstock serve --model-repository examples/model_repository --allow-client-shm
python shared_memory.py [--url 127.0.0.1:8000]
"""

from __future__ import annotations

import argparse
import os

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
    names = {kind: f"add_sub_{kind}_{os.getpid()}" for kind in ("inputs", "outputs")}
    regions = {kind: shm.create_shared_memory_region(name, f"/{name}", 2 * SIZE) for kind, name in names.items()}
    with triton.InferenceServerClient(arguments.url) as client:
        try:
            shm.set_shared_memory_region(regions["inputs"], [left, left])
            for name in names.values():
                client.register_system_shared_memory(name, f"/{name}", 2 * SIZE)
            inputs = [triton.InferInput(name, [1, 16], "FP32") for name in ("INPUT0", "INPUT1")]
            outputs = [triton.InferRequestedOutput(name, binary_data=True) for name in ("OUTPUT0", "OUTPUT1")]
            for index in range(2):
                inputs[index].set_shared_memory(names["inputs"], SIZE, offset=index * SIZE)
                outputs[index].set_shared_memory(names["outputs"], SIZE, offset=index * SIZE)
            client.infer(arguments.model, inputs, outputs=outputs)
            sums = shm.get_contents_as_numpy(regions["outputs"], np.float32, [1, 16]).copy()
        finally:
            for kind, name in names.items():
                client.unregister_system_shared_memory(name)
                shm.destroy_shared_memory_region(regions[kind])
    print("sums", sums[0])
    np.testing.assert_array_equal(sums, left + left)


if __name__ == "__main__":
    main()
