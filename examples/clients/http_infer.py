"""One inference over HTTP, tensors in binary form.

python http_infer.py [--url 127.0.0.1:8000] [--model add_sub_onnx]
"""

from __future__ import annotations

import argparse

import numpy as np
import tritonclient.http as triton


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="127.0.0.1:8000")
    parser.add_argument("--model", default="add_sub_onnx", help="add_sub_onnx or add_sub")
    arguments = parser.parse_args()

    left = np.arange(16, dtype=np.float32).reshape(1, 16)
    right = np.ones((1, 16), np.float32)
    with triton.InferenceServerClient(arguments.url) as client:
        inputs = [triton.InferInput(name, [1, 16], "FP32") for name in ("INPUT0", "INPUT1")]
        inputs[0].set_data_from_numpy(left)
        inputs[1].set_data_from_numpy(right)
        result = client.infer(arguments.model, inputs, request_id="1")
        metadata = client.get_model_metadata(arguments.model)
    print(f"{metadata['name']} on {metadata['platform']}")
    print("sums       ", result.as_numpy("OUTPUT0")[0])
    print("differences", result.as_numpy("OUTPUT1")[0])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), left + right)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), left - right)


if __name__ == "__main__":
    main()
