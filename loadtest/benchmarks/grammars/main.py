"""A benchmark of what grammars cost: `python loadtest/benchmarks grammars [MODEL]`.

The time of a step in which each of 64 requests gets a token, with grammars and without, in turns, and the CPU time of
all threads. The grammars allow no end before that.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.engines.contract.messages import AbortRequests, AddRequest, Grammar, SamplingParams
from penstock.engines.core import EngineCore
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.runner import OpenVINORunner
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.models.language.models import find_model

_PROMPT, _WARM_UP = 32, 8
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["rose", "tulip", "iris"]},
        "height": {"type": "integer", "minimum": 0, "maximum": 400},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        "open": {"type": "boolean"},
    },
    "required": ["name", "kind", "height", "tags", "open"],
    "additionalProperties": False,
}
_LIST = {"type": "array", "items": _ITEM, "minItems": 500}
_ANY = {"type": "object", "minProperties": 500}
GRAMMARS = {
    "plain": None,
    "schema": Grammar("json_schema", json.dumps(_LIST)),
    "any JSON": Grammar("json_schema", json.dumps(_ANY)),
    "letters": Grammar("regex", "[a-z ]{5000}"),
    "no braces": Grammar("regex", r"[^{}]{5000}"),
}
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "top_p": 0.95}}
_ids = itertools.count(1)


def main(settings: Mapping[str, Any]) -> int:
    config = OpenVINOConfig(model_dir=Path(find_model(settings["model"]).folder), num_blocks=2048)
    in_flight = settings["in_flight"]
    chosen = {name: grammar for name, grammar in GRAMMARS.items() if name in ("plain", *settings["grammars"])}
    scheduler = SchedulerConfig(enable_prefix_caching=False, max_num_seqs=in_flight, max_num_batched_tokens=512)
    core = EngineCore(OpenVINORunner(config), scheduler, time.monotonic)
    print("| grammar | sampling | step, ms | beside plain | CPU, ms | beside plain |\n| --- | --- |" + " ---: |" * 4)
    for sampling, params in SAMPLINGS.items():
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
        for repeat, (name, grammar) in itertools.product(range(settings["repeat"]), chosen.items()):
            constrained = SamplingParams(max_tokens=2000, ignore_eos=True, grammar=grammar, seed=repeat, **params)
            times[name].append(step_seconds(core, constrained, in_flight, settings["steps"]))
        medians = {
            name: [statistics.median(seconds) for seconds in zip(*rows, strict=True)] for name, rows in times.items()
        }
        plain = medians["plain"]
        for name, rows in medians.items():
            cells = [
                f"{1000 * seconds:.2f} | {seconds / base - 1:+.1%}" for seconds, base in zip(rows, plain, strict=True)
            ]
            print(f"| {name} | {sampling} | {' | '.join(cells)} |", flush=True)
    core.close()
    return 0


def step_seconds(core: EngineCore, params: SamplingParams, in_flight: int, steps: int) -> tuple[float, float]:
    """Means of so many steps: seconds, and seconds of CPU."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(300, 3000, (in_flight, _PROMPT)).tolist()
    work = [AddRequest((next(_ids),), prompt, params, arrival_time=time.monotonic()) for prompt in prompts]
    core.step(work)
    while core.stats().num_running < in_flight:
        core.step([])
    for _ in range(_WARM_UP):
        core.step([])
    begin, cpu = time.perf_counter(), time.process_time()
    outputs = [output for _ in range(steps) for output in core.step([]).outputs]
    seconds, cpu = (time.perf_counter() - begin) / steps, (time.process_time() - cpu) / steps
    if len(outputs) < in_flight * (steps - 1) or any(output.finish_reason for output in outputs):
        raise RuntimeError("requests ended too early")
    core.step([AbortRequests([request.ids[0] for request in work])])
    while core.has_work:
        core.step([])
    return seconds, cpu
