"""The language model over a gRPC stream, with the tensors of Triton's vLLM backend.

python llm_stream.py [--url 127.0.0.1:8001] [--question "What does os.path.join do?"]
"""

from __future__ import annotations

import argparse
import json
import queue

import numpy as np
import tritonclient.grpc as triton

# text_input goes to the model as it is; this is how the demo model was taught to see a question
PROMPT = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def tensor(name: str, datatype: str, value: object) -> triton.InferInput:
    found = triton.InferInput(name, [1], datatype)
    found.set_data_from_numpy(np.array([value], np.bool_ if datatype == "BOOL" else np.object_))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--model", default="chat")
    parser.add_argument("--question", default="What does os.path.join do?")
    parser.add_argument("--max-tokens", type=int, default=100)
    arguments = parser.parse_args()

    sampling = {"max_tokens": arguments.max_tokens, "temperature": 0}
    inputs = [
        tensor("text_input", "BYTES", PROMPT.format(question=arguments.question).encode()),
        tensor("stream", "BOOL", True),
        tensor("exclude_input_in_output", "BOOL", True),
        tensor("sampling_parameters", "BYTES", json.dumps(sampling).encode()),
    ]
    responses: queue.SimpleQueue[tuple[triton.InferResult | None, Exception | None]] = queue.SimpleQueue()
    with triton.InferenceServerClient(arguments.url) as client:
        client.start_stream(callback=lambda result, error: responses.put((result, error)))
        client.async_stream_infer(arguments.model, inputs, enable_empty_final_response=True)
        while True:
            result, error = responses.get()
            if error is not None:
                raise SystemExit(str(error))
            text = result.as_numpy("text_output")
            if text is not None:
                print(text[0].decode(), end="", flush=True)
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
    print()


if __name__ == "__main__":
    main()
