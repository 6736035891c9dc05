import re
import zlib

import numpy as np
import triton_python_backend_utils as pb_utils

SIZE = 512


def embed(text):
    """A vector of length 1. Texts that share words, or beginnings of words, are alike."""
    vector = np.zeros(SIZE, np.float32)
    for word in re.findall(r"[a-z]+", text.lower()):
        for part in {word, word[:4]}:
            vector[zlib.crc32(part.encode()) % SIZE] += 1 / len(word) if len(word) < 4 else 1
    return vector / max(float(np.linalg.norm(vector)), 1e-6)


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
            vectors = np.stack([embed(text.decode(errors="replace")) for text in texts.ravel()])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("VECTOR", vectors)]))
        return responses
