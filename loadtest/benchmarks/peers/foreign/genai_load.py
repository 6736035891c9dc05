"""OpenVINO GenAI in this process: `genai_load.py MODEL THREADS PLACES`, then a JSON job per line on standard input.

A job is {"prompts": [...], "concurrency": N, "output_tokens": N, "sampled": bool}. Its answer is one line of JSON on
standard output, with `seconds` and, for each request, `sent`, `ended` and `arrivals` (a pair of time and tokens for
each piece), in seconds after the start. Requests join as places become free. Times are taken after each step of the
pipeline.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import count
from time import perf_counter
from typing import Any

import openvino_genai as genai

_CACHE_GB = 2
_BATCHED_TOKENS = 2048


def pipeline(model: str, threads: int, places: int) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = _CACHE_GB
    scheduler.max_num_seqs = places
    scheduler.max_num_batched_tokens = _BATCHED_TOKENS
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    return genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})


def generation(tokens: int, sampled: bool) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = tokens
    config.ignore_eos, config.do_sample, config.apply_chat_template = True, sampled, False
    if sampled:
        config.temperature, config.top_p = 0.7, 0.9
    return config


def load(pipe: Any, ids: Any, job: dict[str, Any]) -> dict[str, Any]:
    start, config = perf_counter(), generation(job["output_tokens"], job["sampled"])
    waiting: list[str] = job["prompts"][::-1]
    running: list[tuple[Any, dict[str, Any]]] = []
    done: list[dict[str, Any]] = []
    while waiting or running:
        while waiting and len(running) < job["concurrency"]:
            request: dict[str, Any] = {"sent": perf_counter() - start, "arrivals": []}
            running.append((pipe.add_request(next(ids), waiting.pop(), config), request))
        pipe.step()
        now = perf_counter() - start
        for handle, request in running:
            tokens = 0
            while handle.can_read():
                tokens += sum(len(output.generated_ids) for output in handle.read().values())
            if tokens:
                request["arrivals"].append((now, tokens))
        ended = [request for _, request in running if sum(n for _, n in request["arrivals"]) >= job["output_tokens"]]
        for request in ended:
            request["ended"] = now
        done += ended
        running = [(handle, request) for handle, request in running if "ended" not in request]
    return {"seconds": perf_counter() - start, "requests": done}


def main() -> None:
    model, threads, places = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    pipe, ids = pipeline(model, threads, places), count()
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        print(json.dumps(load(pipe, ids, json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
