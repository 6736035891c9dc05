"""The same in the server: an ensemble embeds the question, finds what fits it and lets a language model answer. The
answer comes piece by piece.

pip install 'tritonclient[grpc]'
penstock serve --model-repository examples/rag/models
python ask.py "How do I copy a whole directory?"
"""

from __future__ import annotations

import argparse
import queue
from typing import Any

import numpy as np
import tritonclient.grpc as triton


def tensor(name: str, datatype: str, value: object) -> triton.InferInput:
    made = triton.InferInput(name, [1], datatype)
    made.set_data_from_numpy(np.array([value], np.bool_ if datatype == "BOOL" else np.object_))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="How do I copy a whole directory?")
    parser.add_argument("--url", default="127.0.0.1:8001")
    arguments = parser.parse_args()

    responses: queue.Queue[Any] = queue.Queue()
    client = triton.InferenceServerClient(arguments.url)
    client.start_stream(lambda result, error: responses.put(error or result))
    inputs = [tensor("question", "BYTES", arguments.question.encode()), tensor("stream", "BOOL", True)]
    client.async_stream_infer("rag", inputs)
    final = False
    while not final:
        result = responses.get(timeout=60)
        if isinstance(result, Exception):
            raise result
        for piece in result.as_numpy("answer"):
            print(piece.decode(), end="", flush=True)
        final = result.get_response().parameters["triton_final_response"].bool_param
    print()
    client.stop_stream()
    client.close()


if __name__ == "__main__":
    main()
