"""OpenVINO GenAI's pipeline for images in this process: `genai_images.py MODEL THREADS`, then a JSON job per line on
standard input.

A job is {"image": a JPEG in base64 or null, "prompt": "...", "times": N, "output_tokens": N}: the same request so many
times, one after the other. The answer is that of `genai_load.py`; a picture is decoded within its request.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from io import BytesIO
from time import perf_counter
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from PIL import Image


class Arrivals(genai.StreamerBase):
    """When each token came."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self._start = start
        self.times: list[tuple[float, int]] = []

    def write(self, tokens: Any) -> Any:
        self.times.append((perf_counter() - self._start, len(tokens) if isinstance(tokens, list) else 1))
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        return None


def pixels(jpeg: str) -> Any:
    return ov.Tensor(np.asarray(Image.open(BytesIO(base64.b64decode(jpeg))).convert("RGB"))[None])


def answer(pipe: Any, job: dict[str, Any]) -> dict[str, Any]:
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = job["output_tokens"]
    config.ignore_eos, config.do_sample = True, False
    start, requests = perf_counter(), []
    for _ in range(job["times"]):
        sent, arrivals = perf_counter() - start, Arrivals(start)
        images = [pixels(job["image"])] if job["image"] else []
        made = pipe.generate(job["prompt"], images=images, generation_config=config, streamer=arrivals)
        embeddings = made.perf_metrics.get_prepare_embeddings_duration().mean
        print(f"embeddings of {len(images)} pictures and a text: {embeddings:.0f} ms", file=sys.stderr)
        requests.append({"sent": sent, "ended": perf_counter() - start, "arrivals": arrivals.times})
    return {"seconds": perf_counter() - start, "requests": requests}


def main() -> None:
    model, threads = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    pipe = genai.VLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(pipe, json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
