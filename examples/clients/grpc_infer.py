"""Inferences over gRPC, several at once: what is waiting together is executed together.

python grpc_infer.py [--url 127.0.0.1:8001] [--model add_sub_onnx] [--requests 64]
"""

from __future__ import annotations

import argparse
import asyncio

import numpy as np
import tritonclient.grpc.aio as triton


async def infer(client: triton.InferenceServerClient, model: str, number: int) -> float:
    left = np.full((1, 16), number, np.float32)
    inputs = [triton.InferInput(name, [1, 16], "FP32") for name in ("INPUT0", "INPUT1")]
    inputs[0].set_data_from_numpy(left)
    inputs[1].set_data_from_numpy(left)
    outputs = [triton.InferRequestedOutput("OUTPUT0")]
    result = await client.infer(model, inputs, outputs=outputs, request_id=str(number))
    return float(result.as_numpy("OUTPUT0")[0, 0])


async def run(url: str, model: str, requests: int) -> None:
    async with triton.InferenceServerClient(url) as client:
        sums = await asyncio.gather(*(infer(client, model, number) for number in range(requests)))
        statistics = await client.get_inference_statistics(model)
    print("sums", [int(found) for found in sums])
    counted = statistics.model_stats[0]
    print(f"{counted.inference_count} inferences so far, in {counted.execution_count} executions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--model", default="add_sub_onnx", help="add_sub_onnx or add_sub")
    parser.add_argument("--requests", type=int, default=64)
    arguments = parser.parse_args()
    asyncio.run(run(arguments.url, arguments.model, arguments.requests))


if __name__ == "__main__":
    main()
